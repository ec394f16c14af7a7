"""Tables in Markdown: their lines, and rows of other lengths; and the pages that have them."""

from __future__ import annotations

import pytest
from markdown_table import publish, table


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


def test_a_page_is_printed_and_written_with_one_line_end(tmp_path, capsys):
    for page in ("a\nb", "a\nb\n\n"):
        publish(page, tmp_path / "folder" / "page.md")
        assert capsys.readouterr().out == (tmp_path / "folder" / "page.md").read_text() == "a\nb\n"
    publish("c", None)
    assert capsys.readouterr().out == "c\n"
