"""A seeded tenth of the broken checkpoints, and the oracle that judges them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import broken_checkpoints as recipe
import pytest
from broken.cases import KINDS, make_case
from broken.trial import CRASH, FAULTS, HANG, REFUSED, UNNAMED, Verdict, close, failed
from broken.workers import Worker

PARTS, CASES = 3, 35


@pytest.fixture(scope="session")
def bench() -> Iterator[recipe.Bench]:
    with TemporaryDirectory() as folder:  # pytest's own lie where a process without rights can't get
        bench = recipe.Bench(Path(folder), limit=60)
        yield bench
        bench.workers.close()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_broken_checkpoints_load_right_or_are_refused_by_name(bench, part):
    found = bench.run(seed=0, numbers=list(range(part * CASES, (part + 1) * CASES)))
    assert {one.case.kind for one in found} == {*KINDS}
    faults = recipe.listed(found, verbose=False)
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults)


def test_a_case_is_reproducible_from_its_number(bench):
    cases = [make_case(bench.root, 3, number) for number in range(40)]
    assert list(map(str, cases)) == [str(make_case(bench.root, 3, number)) for number in range(40)]
    assert len({*map(str, cases)}) == len(cases)


def test_a_worker_survives_a_request_that_hangs(tmp_path):
    worker = Worker("plain", limit=2)
    try:
        os.mkfifo(tmp_path / "pipe")
        assert worker("wait", path=str(tmp_path / "pipe"))["kind"] == "hang"
        assert worker("tokens", folder=str(tmp_path))["kind"] == "error"
    finally:
        worker.close()


ERROR = {"kind": "error", "type": "ValueError", "one_line": True, "place": "source.py:1"}


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({**ERROR, "text": "/src/config.json is empty"}, REFUSED),
        ({**ERROR, "text": "hidden_size is -1"}, REFUSED),
        ({**ERROR, "text": "num_attention_heads must divide it"}, REFUSED),
        ({**ERROR, "text": "model.layers.1.mlp is missing"}, REFUSED),
        ({**ERROR, "text": "list index out of range"}, UNNAMED),
        ({**ERROR, "text": "config.json is empty", "one_line": False}, UNNAMED),
        ({"kind": "hang", "text": ""}, HANG),
        ({"kind": "crash", "text": "ended by 11"}, CRASH),
    ],
)
def test_verdicts_on_failures(answer, outcome):
    assert failed(answer, ("hidden_size",), frozenset({"num_attention_heads"})).outcome == outcome


def test_logits_are_compared_up_to_rounding():
    def answer(*logits: float) -> dict:
        return {"kind": "done", "logits": [*logits], "dtype": "torch.float32"}

    nan = float("nan")
    assert close(answer(1.0, nan), answer(1.0 + 1e-6, nan))
    assert not close(answer(1.0, 2.0), answer(1.0, 2.01))
    assert not close(answer(1.0), answer(nan))
    assert not close(answer(1.0), answer(1.0, 1.0))
    assert not close(answer(1.0), {"kind": "error"})


def test_a_fault_is_listed_with_the_case_that_shows_it(bench):
    case = make_case(bench.root, 0, 7)
    found = recipe.Found(case, {command: Verdict(FAULTS[0], "why") for command in recipe.COMMANDS})
    assert recipe.listed([found], verbose=False)[0].startswith("--case 7 ")
    assert f"| all | load | 1 |  |  |  |  | 1 |{'  |' * 3}" in "\n".join(recipe.counts([found]))
