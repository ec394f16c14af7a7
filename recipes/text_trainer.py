"""Shared parts of the recipes on transformers' Trainer: text as rows of tokens, a starting model, and the monitor."""

from __future__ import annotations

from dataclasses import dataclass
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
from transformers.hf_argparser import HfArg
from transformers.integrations import is_deepspeed_zero3_enabled

from hf_qknorm import Calibration, LogitMonitor, calibrate, patch_model
from hf_qknorm.measure.text import load_text, sample_batches, tokenize
from hf_qknorm.small_model import byte_tokenizer, mean_loss, small_llama, train

HELD_OUT = 0.1  # the share of the text at its end
HELD_OUT_ROWS = 48  # held-out rows to evaluate on

T = TypeVar("T")


@dataclass
class Arguments(TrainingArguments):
    """All arguments of the Trainer, with defaults for a small model."""

    output_dir: str = "training"
    max_steps: int = 60
    learning_rate: float = 3e-4
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 5
    adam_beta2: float = 0.95
    weight_decay: float = 0.1
    logging_steps: float = 10
    save_strategy: str = "no"
    report_to: str = "none"
    use_cpu: bool = not torch.accelerator.is_available()  # without it, processes on CPUs do not find each other
    dataloader_pin_memory: bool = torch.accelerator.is_available()


@dataclass
class TextOptions:
    """The options about the text and the monitor."""

    text: str | None = HfArg(default=None, help="a file or a folder; default: Python's library")
    length: int = HfArg(default=256, help="tokens per sequence")
    every: int = HfArg(default=10, help="steps between samples of the attention logits")


@dataclass
class BaseOptions(TextOptions):
    """The options of a recipe that starts from a trained model."""

    checkpoint: str | None = HfArg(default=None, help="a causal LM; default: a small Llama, trained first")
    base_steps: int = HfArg(default=200, help="steps of training for the small Llama")
    scheme: str = "qk_norm_cap"
    calibration: int = HfArg(default=16, help="batches of calibration text")


def parse(kind: type[T], out: str, command: list[str] | None) -> tuple[T, Arguments]:
    """Parse a command line into the recipe's options and the Trainer's arguments."""
    parser = HfArgumentParser((kind, Arguments))
    parser.set_defaults(output_dir=out)
    options, arguments = parser.parse_args_into_dataclasses(command)
    torch.manual_seed(arguments.seed)
    return options, arguments


class Text:
    """The tokens of a text, split into a training part and a held-out part."""

    def __init__(self, source: str | None, length: int, tokenizer: PreTrainedTokenizerBase) -> None:
        text = load_text(source)
        cut = int(len(text) * (1 - HELD_OUT))
        self.length = length
        self.seen, self.held_out = tokenize(tokenizer, text[:cut]), tokenize(tokenizer, text[cut:])
        if (least := min(len(self.seen), len(self.held_out))) < self.length:
            raise ValueError(
                f"a part of the text has {least} tokens, expected {self.length} or more (--length) in its first nine "
                "tenths, which train, and in its last: give more text"
            )

    def batches(self, count: int, batch: int, seed: int) -> list[Tensor]:
        """Sample batches `[B, T]` at random places of the training part."""
        return sample_batches(self.seen, count, batch, self.length, seed)

    def rows(self, held_out: bool = False) -> list[dict[str, Tensor]]:
        """All rows of the training part, or `HELD_OUT_ROWS` of the other."""
        ids = self.held_out[: HELD_OUT_ROWS * self.length] if held_out else self.seen
        whole = ids[: len(ids) // self.length * self.length].view(-1, self.length)
        return [{"input_ids": row, "labels": row} for row in whole]


def start(options: BaseOptions, arguments: Arguments) -> tuple[Any, PreTrainedTokenizerBase, Text]:
    """Return the trained model to start from, its tokenizer, and the text."""
    if options.checkpoint is not None:
        tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
        model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32, use_safetensors=True)
        return model, tokenizer, Text(options.text, options.length, tokenizer)
    tokenizer, model = byte_tokenizer(), small_llama()
    text = Text(options.text, options.length, tokenizer)
    print_once(arguments, f"training a small Llama first, for {options.base_steps} steps (or give --checkpoint)")
    batches = text.batches(options.base_steps, arguments.per_device_train_batch_size, arguments.seed)
    train(model, batches, rate=2e-3, warmup=20)
    return model, tokenizer, text


def convert(model: Any, options: BaseOptions, text: Text, arguments: Arguments) -> Calibration | None:
    """Patch and calibrate a model, and return the report; a checkpoint that is converted already stays as it is."""
    if hasattr(model.config, "qk_norm"):
        print_once(arguments, f"{options.checkpoint} is converted already: {model.config.scheme}")
        return None
    patch_model(model, options.scheme)
    batches = text.batches(options.calibration, arguments.per_device_train_batch_size, arguments.seed + 1)
    print_once(arguments, f"calibrating {options.scheme} on {options.calibration} batches")
    report = calibrate(model, batches)
    print_once(arguments, report)
    return report


def make_trainer(model: Any, text: Text, tokenizer: Any, arguments: Arguments, every: int, **options: Any) -> Trainer:
    """Return a Trainer on the text that logs attention logits every few steps to `logits.jsonl` beside the model."""
    trainer = Trainer(
        model,
        arguments,
        train_dataset=text.rows(),
        eval_dataset=text.rows(held_out=True),
        processing_class=tokenizer,
        **options,
    )
    LogitMonitor(every=every, path=Path(arguments.output_dir) / "logits.jsonl").attach(trainer)
    return trainer


def add_loss(losses: dict[str, float], name: str, trainer: Trainer) -> None:
    """Add the model's loss on the held-out rows to `losses`, in nats per token, and print it.

    Before training every process measures it by itself: `Trainer.evaluate` would leave the model without DDP then, so
    that processes train apart without an error, and DeepSpeed refuses it. ZeRO-3's parts have no loss before training.
    """
    if trainer.state.global_step:
        losses[name] = float(trainer.evaluate()["eval_loss"])
    elif is_deepspeed_zero3_enabled():
        return
    else:
        rows = torch.stack([row["input_ids"] for row in trainer.eval_dataset]).to(trainer.model.device)
        with trainer.compute_loss_context_manager():
            losses[name] = mean_loss(trainer.model, list(rows.split(trainer.args.per_device_eval_batch_size)))
    print_once(trainer.args, f"held-out loss, {name}: {losses[name]:.4f}")


def train_and_save(trainer: Trainer, start: str) -> dict[str, float]:
    """Train or resume, save the model, and return its held-out losses; `start` is the name of the one before."""
    losses: dict[str, float] = {}
    add_loss(losses, start, trainer)
    steps, epochs = trainer.args.max_steps, trainer.args.num_train_epochs
    print_once(trainer.args, f"training for {f'{steps} steps' if steps > 0 else f'{epochs:g} epochs'}")
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    add_loss(losses, f"after {trainer.state.global_step} steps", trainer)
    trainer.save_model()
    print_once(trainer.args, f"written: {trainer.args.output_dir}")
    return losses


def print_once(arguments: TrainingArguments, text: object) -> None:
    """Print on the first process only."""
    if arguments.process_index == 0:
        print(text, flush=True)


def print_results(losses: dict[str, float], trainer: Trainer) -> dict[str, float]:
    """Print losses and largest logits as Markdown, and return the losses."""
    lines = ["| | held-out loss |", "|---|---:|", *(f"| {name} | {loss:.4f} |" for name, loss in losses.items())]
    name = "attention/max_logit"  # the monitor's samples
    seen = [entry for entry in trainer.state.log_history if name in entry]
    logits = ", ".join(f"{entry[name]:.1f} at {entry['step']}" for entry in seen)
    largest = ["", f"largest |logit| before any cap, by step: {logits}"] if logits else []
    print_once(trainer.args, "\n".join(["", *lines, *largest]))
    return losses
