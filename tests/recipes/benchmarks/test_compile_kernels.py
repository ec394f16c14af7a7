"""The limits of the compile report, and its tables and complaints by GPU, without a compilation."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which compiles the kernels")
recipe = import_module("compile_kernels")
limits = import_module("kernel_limits")

SOUND = recipe.Report(
    kernel="forward_kernel",
    constants={"BLOCK_M": 128, "BLOCK_N": 128, "PADDED": 128, "TANH": "approx", "ONLINE": False, "CAUSAL": True},
    dtype="bf16",
    warps=8,
    stages=2,
    registers=210,
    spilled=0,
    reloads=0,
    shared=164_864,
    matrix={"HGMMA": 32},
    mufu={"ex2": 1.0, "tanh": 1.0},
    slots=6.4,
    size=1900,
)


def of_keys(head_dim: int) -> limits.Report:
    """The gradients of keys and values without a cap."""
    options = {"PADDED": head_dim, "TANH": "none", "ONLINE": False}
    return replace(SOUND, kernel="key_gradient_kernel", constants=SOUND.constants | options)


EVERY = {"HGMMA": 32, "HMMA": 32, "UTCHMMA": 32}


def with_dropout(head_dim: int) -> limits.Report:
    """A forward pass with dropout and a running maximum."""
    loop = {"PADDED": head_dim, "TANH": "none", "ONLINE": True, "DROPOUT": True}
    return replace(SOUND, constants=SOUND.constants | loop)


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str, interpreted: bool = False) -> str | None:
    """The recipe in this process, which compiles nothing: each case has shared memory by its GPU and head_dim."""

    class Pool(ThreadPoolExecutor):
        def __init__(self, processes: int, context: object) -> None:
            super().__init__(1)

    monkeypatch.setattr(
        recipe, "compile_case", lambda arch, case: [replace(SOUND, matrix=EVERY, shared=1000 * arch + case.head_dim)]
    )
    monkeypatch.setattr(recipe, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(recipe.triton.knobs.runtime, "interpret", interpreted)
    monkeypatch.setattr(sys, "argv", ["compile_kernels.py", *arguments])
    return recipe.main()


def test_kernels_that_are_interpreted_are_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_here(monkeypatch, interpreted=True)
    assert "unset TRITON_INTERPRET" in capsys.readouterr().err


def test_each_gpu_has_its_table(monkeypatch, capsys):
    assert run_here(monkeypatch, "--case", "plain 16", "--arch", "80", "--arch", "100") is None
    first, second = capsys.readouterr().out.split("sm_100, ")
    assert first.startswith("sm_80, ")
    assert "80,016" in first
    assert "100,016" in second
    assert "100,016" not in first


def test_what_is_wrong_is_told_of_its_gpu(monkeypatch):
    monkeypatch.setitem(limits.ARCHITECTURES, (10, 0), limits.ARCHITECTURES[10, 0]._replace(shared=100_100))
    complaints = run_here(monkeypatch, "--arch", "90", "--arch", "100", "--case", "plain 16", "--case", "raw")
    (complaint,) = complaints.splitlines()
    assert complaint.startswith("sm_100 forward_kernel (bf16 ")
    assert complaint.endswith("100,128 bytes of shared memory, expected at most 100,100")


def launched(monkeypatch: pytest.MonkeyPatch, cases: dict) -> set[tuple[str, torch.dtype]]:
    """The kernels that the cases launch on any GPU, none of which is run, with the dtype of their heads."""
    found = set()
    monkeypatch.setenv(recipe.gluon.SWITCH, "0")  # to be put back: cases set it
    for module in (
        recipe.attention,
        recipe.norm_rope,
        recipe.attention.attention_decode,
    ):
        monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: found.add((kernel.__name__, case.dtype)))
    for case in cases.values():
        if recipe.compiles(100, case):
            case.launch()
    return found


def test_the_few_cases_have_every_kernel_in_every_dtype(monkeypatch):
    kernels = {kernel for kernel, _ in launched(monkeypatch, recipe.CASES)}
    assert limits.LIMITS[90].spill_free.keys() - {"gluon_forward_kernel"} < kernels
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    assert launched(monkeypatch, recipe.FEW) == {(kernel, dtype) for kernel in kernels for dtype in dtypes}


def test_a_kernel_within_the_limits_passes():
    assert limits.broken(SOUND) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"spilled": 8}, "8 bytes spilled, 0 instructions in loops, expected at most 0, and none"),
        (
            {"spilled": 24, "kernel": "query_gradient_kernel"},
            "24 bytes spilled, 0 instructions in loops, expected at most 16",
        ),
        (
            {"spilled": 72, "kernel": "key_gradient_kernel"},
            "72 bytes spilled, 0 instructions in loops, expected at most 64",
        ),
        ({"spilled": 8, "reloads": 2}, "8 bytes spilled, 2 instructions in loops"),
        ({"shared": 232_449}, "232,449 bytes of shared memory, expected at most 232,448"),
        ({"matrix": {"HMMA": 64}}, "no HGMMA, got {'HMMA': 64}"),
        ({"matrix": {}}, "no HGMMA, got no matrix instructions"),
        ({"slots": 9.5}, "9.50 issue slots a score, expected at most"),
        ({"slots": None}, "no main loop issue slots a score, expected at most"),
    ],
)
def test_each_limit_is_checked(changes, complaint):
    (found,) = limits.broken(replace(SOUND, **changes))
    assert complaint in found


def test_a_limit_that_nothing_was_measured_by_is_named():
    everything = [*limits.LIMITS[90].spill_free, *limits.limited()]
    met = ["forward_kernel", ("forward_kernel", 128, "approx", False, False)]
    assert set(limits.unmet([SOUND])) == {f"no limit was checked of {x}" for x in everything if x not in met}
    assert len(limits.unmet([replace(SOUND, dtype="fp32")])) == len(everything)


def test_the_few_cases_are_checked_by_every_limit_of_other_gpus():
    for arch in limits.LIMITS.keys() - {90}:
        forward = [
            replace(SOUND, constants=SOUND.constants | dict(zip(("PADDED", "TANH", "ONLINE"), loop, strict=True)))
            for loop in limits.LIMITS[arch].slots
        ]
        forward += [with_dropout(head_dim) for head_dim in limits.LIMITS[arch].dropout]
        forward += [of_keys(head_dim) for head_dim in limits.LIMITS[arch].keys]
        others = [replace(SOUND, kernel=kernel) for kernel in limits.LIMITS[arch].spill_free]
        assert limits.unmet(forward + others, arch, few=True) == []
        assert len(limits.unmet([], arch, few=True)) == len(forward) + len(others)
