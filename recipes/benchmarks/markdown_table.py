"""Tables of the pages in Markdown, and the pages' way out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hf_qknorm.files.atomic_io import replace_text


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> list[str]:
    """Format a table, with an empty line after it.

    `align` has a letter for each column: l for text, r for numbers; the default is text in the first column alone.
    Raises ValueError for a row, or `align`, of another length.
    """
    align = align or "l" + "r" * (len(head) - 1)
    delimiters = [{"l": "---", "r": "---:"}[letter] for letter in align]
    rows = list(rows)
    for row in (delimiters, *rows):
        if len(row) != len(head):
            raise ValueError(f"the table's row {row} has {len(row)} cells, expected {len(head)}, for {head}")
    top, *body = ("| " + " | ".join(cells) + " |" for cells in (head, *rows))
    return [top, f"|{'|'.join(delimiters)}|", *body, ""]


def publish(page: str, output: Path | None) -> str:
    """Print a page, write it as `output`.md, if one is given, in one step, and return it."""
    page = page.rstrip() + "\n"
    print(page, end="")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        replace_text(output.with_suffix(".md"), page)
    return page


def opening(title: str, doc: str | None, made: str) -> list[str]:
    """The first lines of a page: the command and the description of a recipe's docstring, and how it was `made`."""
    command, _, about = (doc or "").partition("\n\n")[2].partition("\n\n")
    return [f"# {title}", "", f"```\n{command.strip()}\n```", "", about.strip(), "", made, ""]
