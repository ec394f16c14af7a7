"""The Gluon kernel: the calls that it serves, its machine code, and, where it is switched on, its results on Hopper.

It is switched on by HF_QKNORM_GLUON=1, also for these tests: a kernel that no GPU has run yet could hang. Triton's
interpreter has no Gluon.
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
from hf_qknorm.ops.triton.launch import launch
from qknorm_tests.kernel_cases import Problem, Raw, plain_problem, raw_problem, shrink_tiles
from qknorm_tests.tiled_cases import Case

HALF, BRAIN = torch.float16, torch.bfloat16
ELSEWHERE = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9
ON_HOPPER = torch.cuda.is_available() and not ELSEWHERE
TAKEN = Case(batch=1, heads=4, queries=40, head_dim=64, causal=True, softcap=50.0)

here = pytest.mark.skipif(ELSEWHERE, reason="this GPU is not a Hopper: the kernel is refused")
asked = pytest.mark.skipif(
    not ON_HOPPER or os.environ.get(gluon.SWITCH) != "1", reason="needs a Hopper GPU, and HF_QKNORM_GLUON=1"
)


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the kernel on, as where kernels are compiled."""
    monkeypatch.setenv(gluon.SWITCH, "1")
    monkeypatch.setattr(gluon, "INTERPRETED", False)


def serves(problem: Problem, statistics: bool = False) -> bool:
    return gluon.serves(problem.heads.q, problem.visible, problem.options, statistics)


@pytest.mark.parametrize("value", [None, "0"])
def test_it_is_off_by_default(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gluon.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(gluon.SWITCH, value)
    assert not serves(plain_problem(TAKEN, BRAIN))


@here
@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize(
    ("changes", "dtype", "taken"),
    [
        ({}, BRAIN, True),
        ({}, HALF, True),
        ({"softcap": None, "causal": False, "keys": 63}, BRAIN, True),
        ({"head_dim": 96}, BRAIN, True),
        ({"head_dim": 256}, BRAIN, True),
        ({"head_dim": 32}, BRAIN, False),
        ({}, torch.float32, False),
        ({"window": 7}, BRAIN, False),
        ({"sinks": True}, BRAIN, False),
        ({"dropout": 0.1}, BRAIN, False),
        ({"ranges": "packed"}, BRAIN, False),
    ],
)
def test_the_calls_that_it_serves(changes: dict[str, Any], dtype: torch.dtype, taken: bool) -> None:
    problem = plain_problem(Case(**{**vars(TAKEN), **changes}), dtype)
    assert serves(problem) == taken
    assert not serves(problem, statistics=True)


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
    run = subprocess.run([sys.executable, script, "64", "128"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for found, head_dim in zip(json.loads(run.stdout), (64, 128), strict=True):
        constants, counts = found["constants"], found["counts"]
        assert constants["PADDED"] == head_dim
        scores, sums = (
            head_dim // 16,
            constants["BLOCK_N"] // 16,
        )  # instructions for a tile: 16 columns of a factor each
        assert counts["HGMMA"] == 2 * (scores + 2 * (scores + sums) + sums)  # before, in and after two loops
        assert counts["UTMALDG"] == 4 * head_dim // 64  # two tiles of queries, one of keys, one of values
        assert found["loads"] == ["UTMALDG.4D"]
        assert counts["UTMASTG"] == 2
        assert counts["USETMAXREG"] >= 3
        assert not counts.keys() & {"LDL", "STL", "HMMA"}
        rings = 4 * constants["STAGES"]
        assert found["barriers"] == {
            "init_barrier": 1 + rings,
            "wait_barrier": 2 * 7 + 2,
            "arrive_barrier": 2 * 5,
            "barrier_expect": 3,
            "fence_async_shared": 3,
        }


MANY = {"batch": 1, "heads": 8, "heads_kv": 2}
RIGHT = [
    (Case(**MANY, queries=1, keys=63, head_dim=64), BRAIN),
    (Case(**MANY, queries=63, causal=True, head_dim=128, softcap=50.0), BRAIN),
    (Case(**MANY, queries=128, causal=True, head_dim=64), HALF),
    (Case(**MANY, queries=300, causal=True, head_dim=96, softcap=50.0), BRAIN),
    (Case(**MANY, queries=300, causal=True, head_dim=256, softcap=100.0), BRAIN),
    (Case(**MANY, queries=111, keys=300, causal=True, head_dim=128, softcap=5.0), HALF),
    (Case(**MANY, queries=300, keys=111, causal=True, head_dim=256), BRAIN),
    (Case(**MANY, queries=200, keys=333, head_dim=64, softcap=50.0), BRAIN),
    (Case(batch=3, heads=7, heads_kv=1, queries=1000, causal=True, head_dim=128), BRAIN),
]


@asked
@pytest.mark.parametrize(("case", "dtype"), RIGHT, ids=str)
def test_output_and_gradients(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are computed by the plain kernels, from its normaliser."""
    shrink_tiles(monkeypatch)  # of backward, to compile in less time
    seen = record(monkeypatch, run=True)
    got = plain_problem(case, dtype).check()
    assert seen[0][0] == "gluon_forward_kernel"
    again = plain_problem(case, dtype).results()
    assert all(torch.equal(got[name], again[name]) for name in got)


@asked
@pytest.mark.parametrize("gain", [0.1, 1.0, 30.0], ids=["within", "usual", "beyond"])
@pytest.mark.parametrize("softcap", [None, 5.0, 50.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_normed_heads_of_any_size(
    head_dim: int, softcap: float | None, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_tiles(monkeypatch)
    raw = Raw(heads=(4, 2), dtype=BRAIN, length=200, head_dim=head_dim)
    problem = raw_problem(raw, Case(causal=True, softcap=softcap))
    if problem.heads.q_norm.gain is not None:
        problem.heads.q_norm.gain.mul_(gain)
    problem.check()
