"""The table of families as printed, and FAMILIES.md, which is generated from it."""

from __future__ import annotations

from importlib import import_module

from hf_qknorm import FAMILIES
from hf_qknorm.families import NORMS_REFUSED, REFUSED, table


def test_each_family_has_a_row():
    lines = table.text().splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(FAMILIES) == sorted(FAMILIES)
    assert len({line.index(line.split()[1], len(line.split()[0])) for line in lines[1:]}) == 1, "columns are aligned"


def test_the_named_file_holds_the_style():
    for model_type, name, *_ in table.rows():
        values = vars(import_module(f"hf_qknorm.families.{name}")).values()
        assert any(value is FAMILIES[model_type].style for value in values), model_type


def test_the_page_is_up_to_date():
    page = table.PAGE.read_text(encoding="utf-8")
    assert page == table.markdown(), "run python -m hf_qknorm.families.table"
    assert all(f"| `{name}` | {why} |" in page for name, why in (REFUSED | NORMS_REFUSED).items())
