"""Tables in Markdown: their lines, and rows of other lengths."""

from __future__ import annotations

import pytest
from markdown_table import table


def test_the_first_column_is_text_and_the_others_are_numbers():
    rows = iter([["a", "1", "2"], ["", "3", ""]])
    assert table(["arm", "x", "y"], rows) == ["| arm | x | y |", "|---|---:|---:|", "| a | 1 | 2 |", "|  | 3 |  |", ""]
    assert table(["arm"], []) == ["| arm |", "|---|", ""]


def test_columns_are_aligned_as_asked_for():
    assert table(["x", "kind"], [["1", "b"]], align="rl")[1] == "|---:|---|"


@pytest.mark.parametrize(("row", "align"), [(["a"], ""), (["a", "1", "2"], ""), (["a", "1"], "lrr")])
def test_rows_of_another_length_are_refused(row, align):
    with pytest.raises(ValueError, match=r"expected 2, for \['arm', 'x'\]"):
        table(["arm", "x"], [row], align=align)
