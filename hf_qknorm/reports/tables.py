"""Texts of paragraphs and tables: predictions, and layers with their logits, bounds and gains."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final

from hf_qknorm.files.formatting import format_fixed
from hf_qknorm.reports.records import LayerStatistics, Prediction

ROWS: Final = 12  # layers in a table: the worst ones; JSON has all layers
WIDTH: Final = 100  # of a paragraph, in characters
LEVELS: Final = ("calm", "raised", "large", "runaway")  # |logit| up to half the cap, the cap, twice the cap, above
READING: Final = "max |logit|: worst head, before any cap; entropy: sharpest head, in nats; >: share of larger |logits|"
BOUND: Final = "bound: the largest |logit| that any input can give"
LIMITS: Final = f"{BOUND}; gain: the largest |gain|"
COSTS: Final = "KL: from the unpatched model, in nats per token"


def page(*parts: str) -> str:
    """The parts that are not empty, with an empty line between them."""
    return "\n\n".join(part for part in parts if part)


def predictions_table(predictions: Mapping[str, Prediction | None]) -> str:
    """A table with a line per prediction that is not None; empty without any."""
    found = {name: p for name, p in predictions.items() if p is not None}
    bounded = any(p.bound is not None for p in found.values())
    rows = [["", "loss", "perplexity", "KL", "same top token", *["bound"] * bounded]]
    for name, p in found.items():
        row = [name, f"{p.loss:.3f}", f"{p.perplexity:.2f}", f"{p.kl:.4f}", f"{p.agreement:.1%}"]
        rows.append([*row, *[_bound(p.bound)] * bounded])
    reading = "; ".join([COSTS, *[BOUND] * bounded])
    return f"{_aligned(rows)}\n\n{reading}" if found else ""


def layers_table(layers: Mapping[str, Sequence[LayerStatistics]], cap: float) -> str:
    """A table of the layers with the largest logits, and how to read it.

    A layer has its statistics, or those before and after a change; arrows join these. Gains and bounds are the last
    one's.
    """
    ranked = sorted(layers.items(), key=lambda item: -max(item[1][-1].max_logit))
    normed = any(not seen[-1].gain_q is seen[-1].gain_k is None for seen in layers.values())
    rows = [["layer", "", "max |logit|", "entropy", f"> {cap / 2:g}", *["bound", "gain q, k"] * normed]]
    for name, seen in ranked[:ROWS]:
        last = seen[-1]
        level = LEVELS[sum(max(last.max_logit) > factor * cap for factor in (0.5, 1, 2))]
        cells = ([f"{max(x.max_logit):.1f}", f"{min(x.entropy):.2f}", f"{mean(x.over_half):.2%}"] for x in seen)
        gains = ", ".join("-" if gain is None else f"{gain:.3g}" for gain in (last.gain_q, last.gain_k))
        both = (" → ".join(numbers) for numbers in zip(*cells, strict=True))
        rows.append([name, level, *both, *[_bound(last.bound), gains] * normed])
    rest = f"\n… and {len(layers) - ROWS} calmer layers" if len(layers) > ROWS else ""
    reading = ";\n".join([READING, f"calm ≤ {cap / 2:g}, raised ≤ {cap:g}, large ≤ {2 * cap:g}", *[LIMITS] * normed])
    return f"{_aligned(rows)}{rest}\n\n{reading}"


def context_note(length: int | None, context: int | None) -> str:
    """A warning that text was shorter than the model's context; empty if it was not, or where one is unknown."""
    if length is None or context is None or length >= context:
        return ""
    note = (
        f"Measured in sequences of up to {length:,} tokens; the model's context has {context:,}. Later positions were "
        "not measured, and a change of attention may cost more there. length (--length) sets longer sequences."
    )
    return textwrap.fill(note, WIDTH)


def mean(values: Sequence[float]) -> float:
    """The mean of the numbers; infinite or NaN where they are, unlike `statistics.fmean`, and NaN without any."""
    return sum(values) / len(values) if values else math.nan


def _bound(bound: float | None) -> str:
    return "-" if bound is None else format_fixed(bound, 1)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text: the first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
