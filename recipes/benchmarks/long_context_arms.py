"""The arms of `long_context.py`, the models and text that they are put on, and the measurement of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from long_context_tasks import KINDS, Draw, Stage, copying, losses_by_position
from run_log import Row
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import SCHEMES, calibrate, patch_model
from hf_qknorm.measure.text import load_text, sample_batches, tokenize


@dataclass(frozen=True)
class Arm:
    """A conversion: a scheme and its knee, whether the text for it has the longest rows, and whether the scheme has a
    length scale.
    """

    scheme: str = "qk_norm_cap"
    knee: float | str = 0.0
    longest: bool = False
    length_scale: bool = False


ARMS = {
    "unpatched": Arm("none"),
    "a cap alone": Arm("soft_cap"),
    "knee 0": Arm(),
    "knee 2": Arm(knee=2.0),
    "knee 4": Arm(knee=4.0),
    "knee 8": Arm(knee=8.0),
    "found knee": Arm(knee="auto"),
    "knee 0, longest rows": Arm(longest=True),
    "found knee, longest rows": Arm(knee="auto", longest=True),
    "unpatched, length scale": Arm("none", length_scale=True),
    "knee 0, length scale": Arm(length_scale=True),
    "found knee, length scale": Arm(knee="auto", length_scale=True),
}


@dataclass(frozen=True)
class Size:
    """The trained length, the amounts of text, and the lessons in copying."""

    length: int = 256
    rows: int = 64
    calibrated: int = 128
    span: int = 32
    tokens: int = 4096  # a distance
    short: Stage = Stage(1500, 16, 64)
    mixed: Stage = Stage(600, 4, 256)

    @property
    def edges(self) -> list[int]:
        """Where stretches of positions begin and end."""
        return [self.length * eighths // 8 for eighths in (0, 2, 4, 8, 12, 16, 24, 32)]

    @property
    def distances(self) -> list[int]:
        """From a span to its copy; with a distance of the trained length less the span, the row has that length."""
        parts = [self.length * quarters // 4 for quarters in (1, 2)]
        return parts + [self.length * part // 2 - self.span for part in (2, 3, 4, 6, 8)]


SIZES = {
    "quick": Size(length=32, rows=2, calibrated=8, span=8, tokens=64, short=Stage(2, 4, 32),
                  mixed=Stage(2, 2, 64)),
    "full": Size(),
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A checkpoint, its text, and how far it is measured."""

    name: str
    checkpoint: str
    text: str
    size: Size

    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.checkpoint, use_safetensors=True).eval()

    def tokens(self) -> tuple[Tensor, Tensor]:
        """The tokens of the first nine tenths of the text, and of the last."""
        tokenizer, characters = AutoTokenizer.from_pretrained(self.checkpoint), load_text(self.text)
        cut = int(len(characters) * 0.9)
        return tokenize(tokenizer, characters[:cut]), tokenize(tokenizer, characters[cut:])


def reach(model: Any, size: Size) -> int:
    """The longest row: four times the trained length, or the end of learned positions."""
    learned = getattr(model.config, "rope_parameters", None) is None
    return min(4 * size.length, model.config.max_position_embeddings) if learned else 4 * size.length


def convert(model: Any, arm: Arm, seen: Tensor, size: Size) -> None:
    """Patch and calibrate the model in place."""
    scheme = replace(SCHEMES[arm.scheme], length_scale=size.length if arm.length_scale else None)
    patch_model(model, scheme)
    if not model.config.scheme.norms:
        return
    length = reach(model, size) if arm.longest else size.length
    batches = sample_batches(seen, size.calibrated // 4, 4, size.length, seed=1)
    if arm.longest:
        count = size.calibrated * size.length // length
        batches = sample_batches(seen, count, 1, length, seed=1)
    calibrate(model, batches, "moments", knee=arm.knee, max_tokens=2**20)  # type: ignore[arg-type]


def measure(model: Any, held_out: Tensor, size: Size, count: int, kinds: Sequence[str] = KINDS[:1]) -> Row:
    """The losses by position of `count` rows, and the copying by kind and distance."""
    longest = reach(model, size)
    edges = [edge for edge in size.edges if edge <= longest]
    starts = torch.linspace(0, len(held_out) - longest, count).long().tolist()
    rows = torch.stack([held_out[start : start + longest] for start in starts])
    copied: dict[str, Row] = {}
    for kind in kinds:
        distances = [distance for distance in size.distances if distance + size.span <= longest]
        found = {str(d): copying(model, Draw(held_out, d), kind, d, size.span, size.tokens) for d in distances}
        copied[kind] = found
    return {"knee": model.config.scheme.knee, "edges": edges, "losses": losses_by_position(model, rows, edges),
            "copying": copied}  # fmt: skip
