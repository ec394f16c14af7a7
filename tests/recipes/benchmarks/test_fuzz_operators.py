"""The operators refuse arguments that do not fit, by name; the fuzz that shows it finds faults; its page is current."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fuzz.draws import Target, targets
from fuzz.edits import edits
from fuzz.lines import FLOATING, Line, Number, Values, misfits
from fuzz.tables import CPP, SWITCH
from fuzz_operators import fault, table

from hf_qknorm.ops.cpu import build

PAGE = Path(__file__).parents[3] / "hf_qknorm" / "ops" / "OPERATORS.md"


def faults(target: Target, seed: int, *, only_misfits: bool = False) -> list[str]:
    values = target.draw(seed)
    edited = [("as drawn", values), *edits(values, target.table)]
    chosen = [(words, x) for words, x in edited if not only_misfits or misfits(target.table, x)]
    assert len(chosen) > 50
    return [f"{words}: {found}" for words, x in chosen if (found := fault(target, x)) is not None]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CPP)
def test_cpp_operators(name: str, seed: int) -> None:
    if (reason := build.why_not()) is not None:
        pytest.skip(reason)
    target = next(x for x in targets() if x.name == name)
    assert faults(target, seed) == []


LINES = {
    "x": Line("N", FLOATING),
    "y": Line("N/1", FLOATING, "rows", optional=True),
    "n": Number("≥ 0", lambda x, _: x >= 0),
}
VALUES: Values = {"x": torch.ones(3), "y": torch.zeros(3), "n": 1}


def add(values: Values) -> list[torch.Tensor]:
    """An operator that checks its arguments: x + n, also written to y."""
    if misfits(LINES, values):
        raise ValueError(f"{misfits(LINES, values)[0]} does not fit")
    return [values["x"] + values["n"]]


def write_around(values: Values) -> list[torch.Tensor]:
    found = add(values)
    y = values["y"]
    torch.as_strided(y, (1,), (1,), y.storage_offset() + y.numel()).fill_(5.0) if y.storage_offset() else None
    return found


@pytest.mark.parametrize(
    ("call", "edit", "found"),
    [
        (add, {}, None),
        (add, {"x": torch.ones(4)}, None),
        (lambda values: [torch.ones(3)], {"n": -1}, "accepted, and n does not fit"),
        (lambda values: [values["z"]], {"n": -1}, "an error of another type: KeyError"),
        (write_around, {}, "memory around y was changed"),
    ],
)
def test_the_fuzz_finds_each_kind_of_fault(call, edit, found) -> None:
    result = fault(Target("add", LINES, lambda seed: VALUES, call), VALUES | edit)
    assert (result is None) if found is None else str(result).startswith(found)


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_edits_break_every_line_of_the_table(target: Target) -> None:
    if (reason := build.why_not()) is not None:
        pytest.skip(reason)
    broken = {name for name, line in target.table.items() if line is SWITCH}
    for seed in range(8):  # an optional argument is not in each draw
        for words, edited in edits(target.draw(seed), target.table):
            broken |= {words.split()[0]} & {*misfits(target.table, edited)}
    assert broken == {*target.table}


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
