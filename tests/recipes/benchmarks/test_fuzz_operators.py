"""The operators refuse arguments that do not fit, by name; the fuzz that shows it finds faults; its page is current."""

from pathlib import Path

import pytest
import torch
from fuzz.draws import Target, targets
from fuzz.edits import edits
from fuzz.lines import Values, misfits
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
    assert faults(next(x for x in targets() if x.name == name), seed) == []


def write_around(values: Values) -> list[torch.Tensor]:
    for x in values.values():
        if isinstance(x, torch.Tensor) and x.storage_offset():
            torch.as_strided(x, (1,), (1,), x.storage_offset() - 1).fill_(5)
    return []


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda values: [], "accepted, and "),
        (lambda values: [values["z"]], "an error of another type: KeyError"),
        (write_around, "memory around q was changed"),
    ],
)
def test_the_fuzz_finds_each_kind_of_fault(call, found) -> None:
    target = next(target for target in targets() if "dq" in target.table)
    assert any(found in line for line in faults(target._replace(call=call), 0))


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_edits_break_every_line_of_the_table(target: Target) -> None:
    if (reason := build.why_not()) is not None:
        pytest.skip(reason)
    broken = {name for name, line in target.table.items() if line is SWITCH}
    for seed in range(16):  # an optional argument is not in each draw
        for words, edited in edits(target.draw(seed), target.table):
            broken |= {words.split()[0]} & {*misfits(target.table, edited)}
    assert broken == {*target.table}


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
