"""The report of compiled kernels: its limits, tables and complaints by GPU; and some kernels, which keep them."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which compiles the kernels")
recipe = import_module("compile_kernels")
limits = import_module("kernel_limits")

SOUND = recipe.Report(
    kernel="forward_kernel", constants={"PADDED": 128}, dtype="bf16", warps=8, stages=2, registers=210, spilled=0,
    shared=164_864, matrix={"HGMMA": 32}, size=1900,
)  # fmt: skip


def launched(monkeypatch: pytest.MonkeyPatch, cases: dict) -> set[tuple[str, torch.dtype]]:
    """The kernels that the cases launch on any GPU, none of which is run, with the dtype of their heads."""
    found = set()
    monkeypatch.setenv(recipe.gluon.SWITCH, "0")  # to be put back: cases set it
    for module in (recipe.attention, recipe.norm_rope, recipe.attention.attention_decode):
        monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: found.add((kernel.__name__, case.dtype)))
    for case in cases.values():
        if not getattr(case, "gluon", False):
            case.launch()
    return found


def test_the_small_cases_have_every_kernel_in_every_dtype(monkeypatch):
    kernels = {kernel for kernel, _ in launched(monkeypatch, recipe.CASES)}
    assert set(limits.KERNELS) < kernels
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    assert launched(monkeypatch, recipe.SMALL) == {(kernel, dtype) for kernel in kernels for dtype in dtypes}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"spilled": 8}, "8 bytes spilled, expected at most 0"),
        ({"spilled": 24, "kernel": "query_gradient_kernel"}, "24 bytes spilled, expected at most 16"),
        ({"spilled": 72, "kernel": "key_gradient_kernel"}, "72 bytes spilled, expected at most 64"),
        ({"spilled": 72, "constants": {"PADDED": 96}}, "72 bytes spilled, expected at most 64"),
        ({"shared": 232_449}, "232,449 bytes of shared memory, expected at most 232,448"),
        ({"matrix": {"HMMA": 64}}, "no HGMMA, got {'HMMA': 64}"),
        ({"matrix": {}}, "no HGMMA, got no matrix instructions"),
        ({"matrix": {}, "dtype": "fp32"}, None),
    ],
)
def test_each_limit_is_checked(changes, complaint):
    assert limits.broken(replace(SOUND, **changes)) == [complaint] * (complaint is not None)


@pytest.mark.slow
def test_kernels_keep_their_limits_on_hopper(run_recipe):
    """One of each: .ci/run compiles more, and prints the table."""
    cases = [x for case in ("capped 64", "step 64", "gluon, cap None") for x in ("--case", case)]
    printed = run_recipe("compile_kernels.py", "--arch", 90, *cases, "--processes", 1)
    for kernel in (*limits.KERNELS, "gluon_forward_kernel"):
        assert f"| {kernel} | bf16" in printed
