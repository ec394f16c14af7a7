"""Pages as HTML, for notebooks. All text is escaped: names of models and files are not to be trusted.

There are no colours: a notebook's own, for text and tables, suit its theme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from hf_qknorm.reports.tables import Page, Points, Table

LEFT, RIGHT = "text-align:left", "text-align:right"


def page_html(page: Page) -> str:
    """The page as HTML: it says the same as `tables.page_text`."""
    return f"<div>{''.join(_part(part) for part in page if str(part))}</div>"


def fields_html(fields: Mapping[str, str]) -> str:
    """A table with a row per title and text."""
    rows = (_row([title, text], "td", LEFT) for title, text in fields.items())
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


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
