"""What the recipes on transformers' Trainer share: text as rows of tokens, a model to start from, and the monitor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from hf_qknorm import LogitMonitor
from hf_qknorm.convert.calibrate import METHODS
from hf_qknorm.convert.text import load_text, sample_batches, tokenize
from hf_qknorm.demo.training import byte_tokenizer, small_llama, train

HELD_OUT = 0.1  # the last tenth of the text
JUDGING = 48  # rows of it that tell the held-out loss

T = TypeVar("T")


@dataclass
class Arguments(TrainingArguments):
    """The Trainer's arguments, all of them, with defaults for a small model."""

    output_dir: str = "training"
    max_steps: int = 60
    learning_rate: float = 3e-4
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 5
    adam_beta2: float = 0.95
    weight_decay: float = 0.1
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    logging_steps: float = 10
    save_strategy: str = "no"
    report_to: str = "none"
    use_cpu: bool = not torch.accelerator.is_available()  # untold, processes without GPUs don't find each other
    dataloader_pin_memory: bool = torch.accelerator.is_available()


@dataclass
class TextOptions:
    """Where text and model come from."""

    text: str | None = field(
        default=None, metadata={"help": "a file, a folder or a Hub dataset; default: Python's library"}
    )
    length: int = field(default=256, metadata={"help": "tokens in a sequence"})
    every: int = field(default=10, metadata={"help": "steps between two looks at the attention logits"})


@dataclass
class BaseOptions(TextOptions):
    """What a trained model is needed for."""

    checkpoint: str | None = field(
        default=None, metadata={"help": "a causal LM; default: a small Llama, trained first"}
    )
    base_steps: int = field(default=200, metadata={"help": "steps of training for the small Llama"})
    scheme: str = "qk_norm_cap"
    calibration: int = field(default=16, metadata={"help": "batches that the gains are fitted to"})
    method: str | None = field(
        default=None, metadata={"choices": list(METHODS), "help": "default: gains in closed form, and a knee found"}
    )


def parse(options: type[T], out: str, command: list[str] | None) -> tuple[T, Arguments]:
    """The options of a recipe and the Trainer's arguments, from a command line."""
    parser = HfArgumentParser((options, Arguments))
    parser.set_defaults(output_dir=out)
    told, arguments = parser.parse_args_into_dataclasses(command)
    torch.manual_seed(arguments.seed)
    return told, arguments


class Text:
    """A text's tokens, cut into what is trained on and what is held out."""

    def __init__(self, options: TextOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        text = load_text(options.text)
        cut = int(len(text) * (1 - HELD_OUT))
        self.length = options.length
        self.seen, self.held_out = tokenize(tokenizer, text[:cut]), tokenize(tokenizer, text[cut:])

    def batches(self, count: int, batch: int, seed: int) -> list[Tensor]:
        """Batches `[B, T]` at random places of what is trained on."""
        return sample_batches(self.seen, count, batch, self.length, seed)

    def rows(self) -> list[dict[str, Tensor]]:
        return _rows(self.seen, self.length)

    def judging(self) -> list[dict[str, Tensor]]:
        return _rows(self.held_out, self.length)[:JUDGING]


def _rows(ids: Tensor, length: int) -> list[dict[str, Tensor]]:
    whole = ids[: len(ids) // length * length].view(-1, length)
    return [{"input_ids": row, "labels": row} for row in whole]


def start(options: BaseOptions, arguments: Arguments) -> tuple[Any, PreTrainedTokenizerBase, Text]:
    """The trained model that is gone on with, its tokenizer, and the text."""
    if options.checkpoint is not None:
        tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
        model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32, use_safetensors=True)
        return model, tokenizer, Text(options, tokenizer)
    tokenizer, model = byte_tokenizer(), small_llama()
    text = Text(options, tokenizer)
    batches = text.batches(options.base_steps, arguments.per_device_train_batch_size, arguments.seed)
    train(model, batches, rate=2e-3, warmup=20, decay=True, what="training a small Llama")
    return model, tokenizer, text


def make_trainer(model: Any, text: Text, tokenizer: Any, arguments: Arguments, every: int, **options: Any) -> Trainer:
    """A Trainer on the text that notes the attention logits every few steps, in `logits.jsonl` beside the model.

    A run that is not resumed takes the place of what the folder holds.
    """
    trainer = Trainer(
        model,
        arguments,
        train_dataset=text.rows(),
        eval_dataset=text.judging(),
        processing_class=tokenizer,
        **options,
    )
    path = Path(arguments.output_dir) / "logits.jsonl"
    if arguments.process_index == 0 and arguments.resume_from_checkpoint is None:
        path.unlink(missing_ok=True)
    LogitMonitor(every=every, path=path).attach(trainer)
    return trainer


def held_out_loss(trainer: Trainer) -> float:
    """Nats a token on the held-out rows."""
    return float(trainer.evaluate()["eval_loss"])


def train_and_save(trainer: Trainer, losses: dict[str, float]) -> None:
    """Train, or go on from a checkpoint, save the model, and add its held-out loss to `losses`."""
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    losses[f"after {trainer.state.global_step} steps"] = held_out_loss(trainer)
    trainer.save_model()


def largest_logits(trainer: Trainer) -> list[tuple[int, float]]:
    """Step and largest |logit|, as the monitor noted them."""
    name = "attention/max_logit"
    return [(entry["step"], entry[name]) for entry in trainer.state.log_history if name in entry]


def say(arguments: Arguments, what: object) -> None:
    """Print it, from one of the processes."""
    if arguments.process_index == 0:
        print(what, flush=True)


def told(losses: dict[str, float], trainer: Trainer) -> str:
    """What came of it, as Markdown."""
    lines = ["| | held-out loss |", "|---|---:|", *(f"| {what} | {loss:.4f} |" for what, loss in losses.items())]
    logits = ", ".join(f"{logit:.1f} at {step}" for step, logit in largest_logits(trainer))
    return "\n".join(["", *lines, "", f"largest |logit| before any cap, by step: {logits}"])
