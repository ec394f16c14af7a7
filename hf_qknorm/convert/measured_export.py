"""Export of a checkpoint whose norms still act, as the model without them, at a cost that is measured on text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from hf_qknorm.checkpoint.destinations import check_folder
from hf_qknorm.checkpoint.source import open_source
from hf_qknorm.export.native import NativeExport, export_native
from hf_qknorm.files.paths import user_path
from hf_qknorm.measure.measured_checkpoint import loaded_with_text
from hf_qknorm.measure.predictions import loss_of
from hf_qknorm.measure.text import batches_for, check_text, sequence_length


class MeasuredExport(NamedTuple):
    """An export without norms, and the losses in nats per token of the checkpoint and of the export."""

    export: NativeExport
    before: float
    after: float
    tokens: int

    def __str__(self) -> str:
        change = f"{self.before:.4f} → {self.after:.4f} ({self.after - self.before:+.4f} nats per token)"
        return f"{self.export}\nloss {change} on {self.tokens:,} tokens"


def export_measured(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    texts: str,
    *,
    max_loss_increase: float | None = None,
    tokens: int = 16_384,
    length: int | None = None,
    overwrite: bool = False,
) -> MeasuredExport:
    """Export a patched checkpoint as `export_native` does, its norms replaced by constant factors if they still act.

    Both models are loaded, one after the other, and their losses measured on the first `tokens` tokens of `texts` (a
    source for `load_text`), in sequences of `length` tokens. Sharp norms, opened in training, cost little
    (recipes/results/seat_belt.md).

    Raises ValueError, with nothing written, if the loss rises by more than `max_loss_increase` nats per token (None
    means no limit), and what `export_native` raises.
    """
    check_text(texts)
    folder, destination = user_path(src, "src"), user_path(dst, "dst")
    check_folder(destination, overwrite=overwrite, sources=[folder])
    before = _loss(folder, texts, tokens, length)
    losses: list[float] = []

    def check(folder: Path) -> None:
        losses.append(_loss(folder, texts, tokens, length))
        rise = losses[0] - before
        if max_loss_increase is not None and not rise <= max_loss_increase:
            raise ValueError(
                f"{src} is not exported: without its norms the loss goes from {before:.4f} to {losses[0]:.4f} "
                f"({rise:+.4f} nats per token), more than --max-loss-increase {max_loss_increase:g}. Open the knee in "
                "training (KneeSchedule(target=math.inf)), or raise the limit"
            )

    export = export_native(src, dst, overwrite=overwrite, end_norms=True, check_result=check)
    return MeasuredExport(export, before, losses[0], tokens)


def _loss(folder: Path, texts: str, tokens: int, length: int | None) -> float:
    """The loss of a checkpoint's model on a text."""
    with open_source(folder) as source:
        length = sequence_length(source.config, length)
        with loaded_with_text(source, texts, tokens, length) as (model, row, sequences):
            return loss_of(model, batches_for(model, [row], None, batch=sequences, length=length, max_tokens=tokens))
