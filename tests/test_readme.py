"""The README's tables and commands name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tables import MODEL_TYPES

from hf_qknorm import SCHEMES
from hf_qknorm.backends.functions import CAP_BACKENDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*SCHEMES, *MODEL_TYPES])
def test_every_scheme_and_family_has_a_row(name):
    assert re.search(rf"^\| `{name}` \|", README, re.MULTILINE)


def test_every_backend_that_caps_is_named():
    table = README[README.index("## Backends") : README.index("## Layout")]
    for backend in CAP_BACKENDS:
        assert backend in table or backend.removeprefix("flash_attention_") in table.partition("flash_attention_")[2]


def test_linked_files_are_there():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    for link in links:
        assert (ROOT / link).is_file(), link
