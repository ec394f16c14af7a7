"""The Gluon kernel: the calls that it serves, its machine code, and its results on Hopper.

Triton's interpreter has no Gluon.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_qknorm.ops.triton import attention, gluon
from hf_qknorm.ops.triton.architectures import BLACKWELL, HOPPER
from hf_qknorm.ops.triton.launch import launch
from qknorm_tests.kernel_cases import Problem, Raw, plain_problem, raw_problem, shrink_tiles
from qknorm_tests.tiled_cases import Case

HALF, BRAIN = torch.float16, torch.bfloat16
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
TAKEN = Case(batch=3, heads=32, queries=400, head_dim=128, causal=True, softcap=50.0)
hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels are compiled for Hopper."""
    monkeypatch.setattr(gluon, "INTERPRETED", False)
    monkeypatch.setattr(gluon, "architecture", lambda device: HOPPER)


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
    monkeypatch.setenv(gluon.SWITCH, "0")
    assert not serves(problem)


def test_other_gpus_and_the_interpreter_take_the_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = plain_problem(TAKEN, BRAIN)
    monkeypatch.setattr(gluon, "INTERPRETED", True)
    assert not serves(problem)
    monkeypatch.setattr(gluon, "INTERPRETED", False)
    monkeypatch.setattr(gluon, "architecture", lambda device: BLACKWELL)
    assert not serves(problem)


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gluon.SWITCH, "yes")
    with pytest.raises(ValueError, match="HF_QKNORM_GLUON must be 1 .*, got 'yes'"):
        serves(plain_problem(TAKEN, BRAIN))


def record(monkeypatch: pytest.MonkeyPatch, run: bool) -> list[tuple[str, dict[str, Any]]]:
    """Record the launches of attention kernels, and run them if `run`."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def recorded(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        seen.append((kernel.__name__, options | {"grid": grid}))
        if run:
            launch(kernel, grid, *arguments, **options)

    monkeypatch.setattr(gluon, "launch", recorded)
    monkeypatch.setattr(attention, "launch", recorded)
    return seen


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


@hopper
@pytest.mark.usefixtures("for_all")
@pytest.mark.parametrize(("case", "dtype"), RIGHT, ids=str)
def test_output_and_gradients(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are computed by the plain kernels, from its normaliser."""
    seen = record(monkeypatch, run=True)
    got = plain_problem(case, dtype).check()
    assert seen[0][0] == "gluon_forward_kernel"
    again = plain_problem(case, dtype).results()
    assert all(torch.equal(got[name], again[name]) for name in got)


@hopper
@pytest.mark.usefixtures("for_all")
@pytest.mark.parametrize("gain", [0.1, 1.0, 30.0], ids=["within", "usual", "beyond"])
@pytest.mark.parametrize("softcap", [None, 5.0, 50.0])
def test_normed_heads_of_any_size(softcap: float | None, gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = Raw(heads=(4, 2), dtype=BRAIN, length=200, head_dim=128)
    problem = raw_problem(raw, Case(causal=True, softcap=softcap))
    if problem.heads.q_norm.gain is not None:
        problem.heads.q_norm.gain.mul_(gain)
    seen = record(monkeypatch, run=True)
    problem.check()
    assert seen[0][0] == "gluon_forward_kernel"
