"""Continue a model's training with MuonClip: Muon on its matrices, AdamW on the rest, QK-Clip on its heads.

    python recipes/muon_clip.py
    python recipes/muon_clip.py --checkpoint gpt2 --text corpus.txt --threshold 100 --max_steps 500
    torchrun --nproc-per-node 2 recipes/muon_clip.py --checkpoint gpt2 --text corpus.txt --bf16 true

Without arguments the recipe first trains a small Llama on the source code of Python's library; this takes a few minutes
on a CPU. It prints the largest logit and the number of clips as it goes, and held-out losses as Markdown. `--threshold`
is the largest logit that QK-Clip allows; it leaves large negative ones alone, which LogitMonitor's |logit| includes.
Models whose queries and keys have norms train with Muon alone: `--threshold 0`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from text_trainer import (
    BaseOptions,
    held_out_loss,
    make_trainer,
    parse,
    print_once,
    results_table,
    start,
    train_and_save,
)
from transformers import TrainerCallback

from hf_qknorm import MuonClip, patch_model


@dataclass
class Options(BaseOptions):
    """The recipe's options, beside the Trainer's arguments."""

    scheme: str = "none"
    threshold: float = field(default=100.0, metadata={"help": "the largest logit; 0: no QK-Clip"})


class Report(TrainerCallback):
    """Prints the largest logit that QK-Clip saw, and how often it clipped a head, every few steps."""

    def __init__(self, optimizer: MuonClip, every: int) -> None:
        self.optimizer, self.every, self.clips = optimizer, every, 0
        self.largest = -math.inf  # of the step; QK-Clip looks no further than its threshold

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        clip = self.optimizer.clip
        found = [] if clip is None else [float(logits.max()) for logits in clip.largest.values()]
        self.largest = max(found, default=-math.inf)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clips += sum(int((factors < 1).sum()) for factors in self.optimizer.clipped.values())
        if state.global_step % self.every == 0:
            seen = "under the threshold" if self.largest == -math.inf else f"{self.largest:.1f}"
            print_once(args, f"step {state.global_step}: largest logit {seen}, {self.clips} clips of a head so far")


def main(command: list[str] | None = None) -> dict[str, float]:
    options, arguments = parse(Options, "qknorm-muon", command)
    model, tokenizer, text = start(options, arguments)
    patch_model(model, options.scheme)
    optimizer = MuonClip(model, arguments, threshold=options.threshold or None)
    for group in optimizer.param_groups:
        count, name = sum(p.numel() for p in group["params"]), "Muon" if group["use_muon"] else "AdamW"
        print_once(arguments, f"{name}: {count:,} parameters, weight decay {group['weight_decay']:g}")
    trainer = make_trainer(model, text, tokenizer, arguments, options.every, optimizers=(optimizer, None))
    trainer.add_callback(Report(optimizer, options.every))
    losses = {"start": held_out_loss(trainer)}
    print_once(arguments, f"held-out loss: {losses['start']:.4f}")
    train_and_save(trainer, losses)
    print_once(arguments, results_table(losses, trainer))
    return losses


if __name__ == "__main__":
    main()
