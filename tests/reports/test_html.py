"""Calibration and Inspection as HTML: it says what their text says, escaped, and leaves colours to the theme."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

import pytest
import torch
from test_report import with_a_knee

import hf_qknorm as qk
from qknorm_tests.tiny import tiny_model

EVIL = '<script>alert("1 & 2")</script>'
TAGS = {"div", "p", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "strong"}


class Reader(HTMLParser):
    """Reads the words, the tags and the cells of each table's rows; asserts that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.rows: list[int] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.add(tag)
        assert all(name == "style" and "color" not in str(value) for name, value in attributes)
        if tag == "tr":
            self.rows.append(0)
        elif tag in ("td", "th"):
            self.rows[-1] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag not in ("strong",):
            self.words.append(" ")

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def text(self) -> list[str]:
        return words("".join(self.words))


def words(text: str) -> list[str]:
    """The words of a text, without the marks of points and of empty cells."""
    return [word for word in text.split() if word != "-"]


def calibration(name: str = "model") -> qk.Calibration:
    report = with_a_knee(layers=14)
    return dataclasses.replace(report, layers={f"{name}.{key}": layer for key, layer in report.layers.items()})


def inspection(name: str = "tiny") -> qk.Inspection:
    model = tiny_model("llama")
    batches = [torch.randint(3, 60, (4, 32), generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    return dataclasses.replace(qk.inspect_model(model, batches), model=name)


MADE = {"calibration": calibration, "inspection": inspection}


@pytest.mark.parametrize("kind", MADE)
def test_the_html_says_what_the_text_says(kind):
    thing = MADE[kind]()
    read = Reader(thing._repr_html_())
    expected = thing.table() + (f" {thing}" if kind == "calibration" else "")
    assert read.text() == words(expected)
    assert read.seen <= TAGS
    assert "table" in read.seen


@pytest.mark.parametrize("kind", MADE)
def test_names_are_escaped(kind):
    html = MADE[kind](EVIL)._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;alert(&quot;1 &amp; 2&quot;)&lt;/script&gt;" in html
    assert Reader(html).seen <= TAGS
