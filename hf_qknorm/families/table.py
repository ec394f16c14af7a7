"""What can be patched, as a table: for the command line, and as Markdown for the page beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hf_qknorm.families import FAMILIES, REFUSED, Family
from hf_qknorm.files.atomic_io import replace_text

HEADINGS: Final = ("model type", "style", "auto norm", "already has", "schemes")
PAGE: Final = Path(__file__).with_name("FAMILIES.md")


def rows() -> list[tuple[str, ...]]:
    """A row for each family, in the order of `HEADINGS`."""
    return [(name, _style(family), family.norm, _has(family), _schemes(family)) for name, family in FAMILIES.items()]


def text() -> str:
    """The table in columns."""
    table = [HEADINGS, *rows()]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADINGS))]
    return "\n".join("  ".join(f"{x:{w}}" for x, w in zip(row, widths, strict=True)).rstrip() for row in table)


def markdown() -> str:
    """The page: the table, and why the other model types are refused."""
    table = [HEADINGS, tuple("---" for _ in HEADINGS), *((f"`{name}`", *rest) for name, *rest in rows())]
    lines = [
        "# Model types",
        "",
        f"{len(FAMILIES)} model types can be patched. The style is the file beside this page that says how queries, "
        "keys and values are made. A model that norms its queries and keys takes a cap and no more norms, as does one "
        "that caches a latent; `qkv_norm` needs a norm in front of attention that is for attention alone. In models "
        "that mix attention with other layers, the softmax attention is patched.",
        "",
        "*(made by `python -m hf_qknorm.families.table`)*",
        "",
        *(f"| {' | '.join(row)} |" for row in table),
        "",
        "## Refused",
        "",
        "| model type | why |",
        "| --- | --- |",
        *(f"| `{name}` | {why} |" for name, why in sorted(REFUSED.items())),
    ]
    return "\n".join(lines) + "\n"


def _style(family: Family) -> str:
    """The file that says how the family projects."""
    return family.style.project.__module__.rpartition(".")[2]


def _has(family: Family) -> str:
    switch = f" ({family.own_norms})" if isinstance(family.own_norms, str) else ""
    has = [
        what
        for what, there in (
            (f"norms on q and k{switch}", family.own_norms),
            ("a cap", family.own_cap),
            ("a latent cache", family.latent),
        )
        if there
    ]
    return ", ".join(has) or "-"


def _schemes(family: Family) -> str:
    if family.own_norms is True or family.latent:
        return "a cap"
    return "all" if family.pre_norm else "all but qkv_norm"


if __name__ == "__main__":
    replace_text(PAGE, markdown())
