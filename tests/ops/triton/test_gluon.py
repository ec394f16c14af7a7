"""The Gluon kernel: the calls that it serves, its machine code, and its results, on Hopper or in the emulator."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_qknorm.ops.error_budget import Verdict, verdict
from hf_qknorm.ops.triton import attention, gluon
from hf_qknorm.ops.triton.launch import launch
from qknorm_tests import gluon_emulator, gluon_machine
from qknorm_tests.kernel_cases import Problem, Raw, plain_problem, raw_problem, shrink_tiles
from qknorm_tests.norm_cases import spread
from qknorm_tests.tiled_cases import Case

HALF, BRAIN = torch.float16, torch.bfloat16
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
TAKEN = Case(batch=3, heads=32, queries=400, head_dim=128, causal=True, softcap=50.0)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels are compiled for Hopper."""
    monkeypatch.setattr(gluon, "INTERPRETED", False)
    monkeypatch.setattr(gluon, "capability", lambda device: gluon.HOPPER)


def serves(problem: Problem, statistics: bool = False) -> bool:
    return gluon.serves(problem.heads.q, problem.visible, problem.options, statistics)


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize(
    ("changes", "dtype", "taken"),
    [
        ({}, BRAIN, True),
        ({}, HALF, True),
        ({"softcap": None, "causal": False, "keys": 63}, BRAIN, True),
        ({"head_dim": 96}, BRAIN, False),
        ({"head_dim": 256}, BRAIN, False),
        ({"head_dim": 64}, BRAIN, False),
        ({"batch": 2}, BRAIN, False),
        ({}, torch.float32, False),
        ({"window": 7}, BRAIN, False),
        ({"sinks": True}, BRAIN, False),
        ({"dropout": 0.1}, BRAIN, False),
        ({"ranges": "packed"}, BRAIN, False),
    ],
)
def test_the_calls_that_it_serves(
    changes: dict[str, Any], dtype: torch.dtype, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = plain_problem(Case(**{**vars(TAKEN), **changes}), dtype)
    assert serves(problem) == taken
    assert not serves(problem, statistics=True)
    for value, on in (("0", False), ("", True)):  # empty is unset
        monkeypatch.setenv(gluon.SWITCH, value)
        assert serves(problem) == (taken and on)


def test_other_gpus_and_the_interpreter_take_the_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = plain_problem(TAKEN, BRAIN)
    monkeypatch.setattr(gluon, "INTERPRETED", True)
    assert not serves(problem)
    monkeypatch.setattr(gluon, "INTERPRETED", False)
    monkeypatch.setattr(gluon, "capability", lambda device: (10, 0))
    assert not serves(problem)


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gluon.SWITCH, "yes")
    with pytest.raises(ValueError, match="HF_QKNORM_GLUON must be 1 .*, got 'yes'"):
        serves(plain_problem(TAKEN, BRAIN))


@pytest.mark.slow
def test_the_machine_code() -> None:
    """It has 4D loads by the copy engine, products of warpgroups, and registers moved from the loading warp."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parents[2] / "qknorm_tests" / "gluon_code.py"
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (found,) = json.loads(run.stdout)
    counts, stages = found["counts"], found["constants"]["STAGES"]
    products = 128 // 16  # instructions for a tile: 16 columns of a factor each, for scores as for sums
    assert counts["HGMMA"] == 2 * (products + 2 * 2 * products + products)  # before, in and after two loops
    assert counts["UTMALDG"] == 4 * 128 // 64  # two tiles of queries, one of keys, one of values
    assert found["loads"] == ["UTMALDG.4D"]
    assert counts["UTMASTG"] == 2
    assert counts["USETMAXREG"] >= 3
    assert not counts.keys() & {"LDL", "STL", "HMMA"}
    assert found["barriers"] == {
        "init_barrier": 3 + 4 * stages,
        "wait_barrier": 2 * 10 + 2,
        "arrive_barrier": 2 * 7 + 1,
        "barrier_expect": 3,
        "fence_async_shared": 3,
    }


MANY = {"batch": 1, "heads": 8, "heads_kv": 2}
RIGHT = [
    (Case(**MANY, queries=65, head_dim=128), BRAIN),
    (Case(**MANY, queries=63, causal=True, head_dim=128, softcap=50.0), BRAIN),
    (Case(**MANY, queries=128, causal=True, head_dim=128), HALF),
    (Case(**MANY, queries=300, causal=True, head_dim=128, softcap=50.0), BRAIN),
    (Case(**MANY, queries=300, causal=True, head_dim=128, softcap=100.0), BRAIN),
    (Case(**MANY, queries=111, keys=300, causal=True, head_dim=128, softcap=5.0), HALF),
    (Case(**MANY, queries=300, keys=111, causal=True, head_dim=128), BRAIN),
    (Case(**MANY, queries=200, keys=333, head_dim=128, softcap=50.0), BRAIN),
    (Case(batch=3, heads=7, heads_kv=1, queries=1000, causal=True, head_dim=128), BRAIN),
]


@pytest.fixture
def for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves few queries too, and tiles of backward are small, to compile in less time."""
    monkeypatch.setattr(gluon, "FEWEST", 0)
    shrink_tiles(monkeypatch)


def record(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the attention kernels that are started."""
    seen: list[str] = []

    def recorded(kernel: Any, *arguments: Any, **options: Any) -> None:
        seen.append(kernel.__name__)
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(gluon, "launch", recorded)
    monkeypatch.setattr(attention, "launch", recorded)
    return seen


@hopper
@pytest.mark.usefixtures("for_all")
@pytest.mark.parametrize(("case", "dtype"), RIGHT, ids=str)
def test_output_and_gradients(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are computed by the plain kernels, from its normaliser."""
    seen = record(monkeypatch)
    got = plain_problem(case, dtype).check()
    assert seen[0] == "gluon_forward_kernel"
    again = plain_problem(case, dtype).results()
    assert all(torch.equal(got[name], again[name]) for name in got)


@hopper
@pytest.mark.usefixtures("for_all")
@pytest.mark.parametrize("gain", [0.1, 1.0, 30.0], ids=["within", "usual", "beyond"])
@pytest.mark.parametrize("softcap", [None, 5.0, 50.0])
def test_normed_heads_of_any_size(softcap: float | None, gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = raw_problem(Raw(heads=(4, 2), dtype=BRAIN, length=200, head_dim=128), Case(causal=True, softcap=softcap))
    if problem.heads.q_norm.gain is not None:
        problem.heads.q_norm.gain.mul_(gain)
    seen = record(monkeypatch)
    problem.check()
    assert seen[0] == "gluon_forward_kernel"


@pytest.fixture
def emulator(for_all: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The Gluon kernel serves few queries in the emulator."""
    if torch.cuda.is_available():
        pytest.skip("the emulator reads tensors on the CPU")
    monkeypatch.setattr(gluon, "INTERPRETED", False)
    started: list[Any] = []

    def counted(*arguments: Any, **options: Any) -> None:
        started.append(arguments)
        gluon_emulator.launch(*arguments, **options)

    monkeypatch.setattr(gluon, "launch", counted)
    emulate(monkeypatch)
    yield
    assert started


def emulate(monkeypatch: pytest.MonkeyPatch, edit: Callable[[str], str] = str) -> None:
    """Run the Gluon kernel, edited, in the emulator."""
    kernel = gluon_emulator.kernel(edit)
    monkeypatch.setattr(gluon, "_module", lambda: SimpleNamespace(gluon_forward_kernel=kernel))


def judged(problem: Problem) -> Verdict:
    """The verdict on the output of the forward pass."""
    out = attention.forward(problem.heads, problem.visible, problem.options).out
    dtypes = (torch.float64, problem.heads.q.dtype)
    exact, eager = (problem.attended(spread(problem.leaves, dtype)).out.detach() for dtype in dtypes)
    return verdict(out, exact, eager)


FEW = {"batch": 1, "heads": 2, "heads_kv": 1, "head_dim": 128}
EMULATED = [
    (Case(**FEW, queries=40), BRAIN),
    (Case(**FEW, queries=65, softcap=50.0), BRAIN),
    (Case(**FEW, queries=128, causal=True), HALF),
    (Case(**FEW, queries=300, causal=True, softcap=100.0), BRAIN),
    (Case(**FEW, queries=111, keys=300, causal=True, softcap=5.0), HALF),
    (Case(**FEW, queries=300, keys=111, causal=True), BRAIN),
    (Case(**FEW | {"batch": 2, "heads": 3}, queries=140, keys=130), BRAIN),
]


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("case", "dtype"), EMULATED, ids=str)
def test_the_emulated_output(case: Case, dtype: torch.dtype) -> None:
    found = judged(plain_problem(case, dtype))
    assert found.passed, found


@pytest.mark.costly
@pytest.mark.usefixtures("emulator")
def test_gradients_from_the_emulated_output_and_normaliser() -> None:
    plain_problem(Case(**FEW | {"heads": 1}, queries=70, keys=130, causal=True, softcap=5.0), BRAIN).check()


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("gain", [0.1, 30.0], ids=["within", "beyond"])
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_the_emulated_loops_of_normed_heads(softcap: float | None, gain: float) -> None:
    problem = raw_problem(Raw(heads=(2, 1), dtype=BRAIN, length=140, head_dim=128), Case(causal=True, softcap=softcap))
    assert problem.heads.q_norm.gain is not None
    problem.heads.q_norm.gain.mul_(gain)
    found = judged(problem)
    assert found.passed, found


def several_tiles() -> Problem:
    """A maximum that rises over several tiles, for two blocks of queries."""
    problem = plain_problem(Case(**FEW | {"heads": 1}, queries=130, keys=500, causal=True), BRAIN)
    problem.heads.q.mul_(3.0)
    return problem


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("late", [False, True], ids=["copies at once", "copies late"])
def test_the_time_of_copies_does_not_matter(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_machine.Barrier, "late", late)
    found = judged(several_tiles())
    assert found.passed, found


def without(line: str) -> Callable[[str], str]:
    return replaced(line, "")


def replaced(old: str, new: str, count: int = -1) -> Callable[[str], str]:
    def edit(source: str) -> str:
        assert old in source
        return source.replace(old, new, count)

    return edit


def swapped(first: str, second: str) -> Callable[[str], str]:
    """Two neighbouring lines in the other order."""

    def edit(source: str) -> str:
        found, lines = re.subn(f"( +{re.escape(first)}\n)( +{re.escape(second)}\n)", r"\2\1", source)
        assert lines == 1
        return found

    return edit


MUTANTS = {
    "keys are freed before their scores are done": swapped(
        "x = warpgroup_mma_wait(0, deps=(x,))", "mbarrier.arrive(k_read.index(0), count=1)"
    ),
    "values are freed before they are added": swapped(
        "acc, weights = warpgroup_mma_wait(0, deps=(sums, weights))", "mbarrier.arrive(v_read.index(v_slot), count=1)"
    ),
    "no wait for values": without("mbarrier.wait(v_full.index(v_slot), v_phase)"),
    "no wait for the last values": without("mbarrier.wait(v_full.index(slot), phase)"),
    "no wait for the next keys": without("mbarrier.wait(k_full.index(next_slot), next_phase)"),
    "no wait for queries": without("mbarrier.wait(q_full, 0)"),
    "one wait too few for scores": replaced("warpgroup_mma_wait(1, deps=(x,))", "warpgroup_mma_wait(2, deps=(x,))"),
    "the phase of free keys": replaced("k_read.index(slot), phase ^ 1", "k_read.index(slot), phase"),
    "the phase of values": replaced("v_full.index(v_slot), v_phase", "v_full.index(v_slot), v_phase ^ 1"),
    "keys are free when one warpgroup has read them": replaced("k_read.index(i), count=2", "k_read.index(i), count=1"),
    "values are free when three have read them": replaced("v_read.index(i), count=2", "v_read.index(i), count=3"),
    "nobody has the first turn": replaced("mbarrier.arrive(turns[1], count=1)", "pass"),
    "turns are not passed on": without("mbarrier.arrive(other, count=1)"),
    "fewer bytes than are loaded": replaced("2 * Q.block_type.nbytes", "Q.block_type.nbytes"),
    "keys of another tile": replaced("(tiles - 1 - n) * C.BLOCK_N, 0]", "(tiles - 2 - n) * C.BLOCK_N, 0]"),
    "no fence between output and its copy": replaced("fence_async_shared()\n    store_tile", "store_tile"),
    "the output's copy is not waited for": replaced("tma.store_wait(0)", "tma.store_wait(1)"),
    "sums are not rescaled": replaced("acc = acc * gl.convert_layout(shrink", "0.0 * gl.convert_layout(shrink"),
    "the first tile has no mask": replaced("score, MASKED=True, C=C\n    )", "score, MASKED=False, C=C\n    )", 1),
}


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_broken_kernels_are_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By wrong numbers, or an error, of which a deadlock is one; with copies at once, or late."""
    emulate(monkeypatch, MUTANTS[mutant])
    problem, found = several_tiles(), []
    for late in (False, True):
        monkeypatch.setattr(gluon_machine.Barrier, "late", late)
        try:
            found.append(judged(problem).passed)
        except gluon_machine.BrokenKernelError:
            found.append(False)
    assert not all(found)
