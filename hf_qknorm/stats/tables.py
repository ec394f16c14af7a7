"""Tables as text: aligned rows, and the cells of a layer's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hf_qknorm.files.formatting import format_fixed

ROWS = 12  # layers in a table: the worst ones; JSON has them all
READING = "max |logit|: worst head, before any cap; entropy: sharpest head, in nats; others: means over heads"
BOUND = "bound: the largest |logit| that any input can give"
BEYOND = "beyond: the share of vectors beyond the knee"


def over_names(cap: float) -> list[str]:
    """The names of the columns of shares over half the cap and over all of it: `> 25`, `> 50`."""
    return [f"> {cap / 2:g}", f"> {cap:g}"]


def bound_cell(bound: float | None) -> str:
    """A bound with one decimal; - for none."""
    return "-" if bound is None else format_fixed(bound, 1)


def pair_of_means(q: Sequence[float] | None, k: Sequence[float] | None, form: str = ".3g") -> str:
    """The means over heads of queries' numbers and of keys': `1.2, 0.8`; - where there are none."""
    cells = ["-" if numbers is None else format(mean(numbers), form) for numbers in (q, k)]
    return "-" if q is None and k is None else ", ".join(cells)


def rest(layers: int) -> str:
    """The line below a table that leaves layers out."""
    return f"\n… and {layers - ROWS} calmer layers" if layers > ROWS else ""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def mean(values: Iterable[float]) -> float:
    """The mean of a few numbers."""
    values = list(values)
    return sum(values) / len(values)
