"""Texts of paragraphs and tables, and the cells for a layer's numbers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from hf_qknorm.files.formatting import format_fixed

ROWS = 12  # layers in a table: the worst ones; JSON has all layers
WIDTH = 100  # of a paragraph, in characters
READING = "max |logit|: worst head, before any cap; entropy: sharpest head, in nats; others: means over heads"
BOUND = "bound: the largest |logit| that any input can give"


def page(*parts: str) -> str:
    """The parts that are not empty, with an empty line between them."""
    return "\n\n".join(stripped for part in parts if (stripped := part.rstrip()))


def bound_cell(bound: float | None) -> str:
    """A bound with one decimal; `-` for None."""
    return "-" if bound is None else format_fixed(bound, 1)


def context_note(length: int | None, context: int | None) -> str:
    """A warning that text was shorter than the model's context; empty if it was not, or where one is unknown."""
    if length is None or context is None or length >= context:
        return ""
    note = (
        f"Measured in sequences of up to {length:,} tokens; the model's context has {context:,}. Later positions were "
        "not measured, and a change of attention may cost more there. length (--length) sets longer sequences."
    )
    return textwrap.fill(note, WIDTH)


def rest(layers: int) -> str:
    """The line below a table that leaves out layers."""
    return f"… and {layers - ROWS} calmer layers" if layers > ROWS else ""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text: the first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def mean(values: Sequence[float]) -> float:
    """The mean of the numbers; infinite or NaN where they are, unlike `statistics.fmean`, and NaN without any."""
    return sum(values) / len(values) if values else math.nan
