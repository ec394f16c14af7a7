"""Pages of paragraphs, tables and lists as text and as HTML, and the cells for a layer's numbers.

HTML is for notebooks. All text in it is escaped: names of models and files are not to be trusted. It has no colours: a
notebook's own, for text and tables, suit its theme.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from hf_qknorm.files.formatting import format_fixed

ROWS = 12  # layers in a table: the worst ones; JSON has all layers
WIDTH = 100  # of the points of a list, in characters
READING = "max |logit|: worst head, before any cap; entropy: sharpest head, in nats; others: means over heads"
BOUND = "bound: the largest |logit| that any input can give"
GAINS = "gains: the largest of each norm"
BEYOND = "beyond: the share of vectors beyond the knee"
LEFT, RIGHT = "text-align:left", "text-align:right"


@dataclass(frozen=True)
class Table:
    """The columns' names, rows of cells, and a line `below`; no rows mean no table."""

    rows: Sequence[Sequence[str]]
    below: str = ""

    def __str__(self) -> str:
        return f"{aligned(self.rows)}\n{self.below}".rstrip() if self.rows else ""


@dataclass(frozen=True)
class Points:
    """A heading and its points."""

    heading: str
    points: Sequence[str]

    def __str__(self) -> str:
        points = [textwrap.fill(p, WIDTH, initial_indent="  - ", subsequent_indent="    ") for p in self.points]
        return "\n".join([self.heading, *points])


Page = Iterable[str | Table | Points]  # a string is a paragraph; empty ones are left out


def page_text(page: Page) -> str:
    """The page as text, with an empty line between its parts."""
    return "\n\n".join(text for part in page if (text := str(part)))


def page_html(page: Page) -> str:
    """The page as HTML: it says the same as `page_text`."""
    return f"<div>{''.join(_part(part) for part in page if str(part))}</div>"


def _part(part: str | Table | Points) -> str:
    if isinstance(part, Table):
        head, *body = part.rows
        below = f"<p>{escape(part.below)}</p>" if part.below else ""
        rows = "".join(_row(cells, "td") for cells in body)
        return f"<table><thead>{_row(head, 'th')}</thead><tbody>{rows}</tbody></table>{below}"
    if isinstance(part, Points):
        points = "".join(f"<li>{escape(point)}</li>" for point in part.points)
        return f"<p><strong>{escape(part.heading)}</strong></p><ul>{points}</ul>"
    return f"<p>{escape(part)}</p>"


def _row(cells: Sequence[str], tag: str, style: str = RIGHT) -> str:
    """A row of a table. The first cell is aligned left, the others by `style`."""
    styled = (f'<{tag} style="{style if i else LEFT}">{escape(cell)}</{tag}>' for i, cell in enumerate(cells))
    return f"<tr>{''.join(styled)}</tr>"


def over_names(cap: float) -> list[str]:
    """The column names of the shares of logits over half the cap and over the cap: `> 25`, `> 50`."""
    return [f"> {cap / 2:g}", f"> {cap:g}"]


def bound_cell(bound: float | None) -> str:
    """A bound with one decimal; `-` for None."""
    return "-" if bound is None else format_fixed(bound, 1)


def pair_of_means(q: Sequence[float] | None, k: Sequence[float] | None, form: str = ".3g") -> str:
    """The means over heads of the numbers of queries and keys: `1.2, 0.8`; `-` for None."""
    cells = ["-" if numbers is None else format(mean(numbers), form) for numbers in (q, k)]
    return "-" if q is None and k is None else ", ".join(cells)


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
