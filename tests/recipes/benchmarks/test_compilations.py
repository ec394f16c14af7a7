"""The recipes that compile kernels for GPUs: the limits hold, and a kernel that breaks one is named."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton, which compiles the kernels")
pytestmark = pytest.mark.slow
RECIPES = Path(__file__).parents[3] / "recipes" / "benchmarks"
limits = import_module("kernel_limits")


def compile_script(*command: object) -> subprocess.CompletedProcess[str]:
    """Run where kernels are compiled: the tests' own process interprets them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(RECIPES.parents[1])
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, check=False
    )


def test_kernels_keep_their_limits_on_hopper():
    """Some of them: .ci/run compiles them all, and prints the table."""
    cases = [x for case in ("capped 64", "step 64", "gluon, uncapped 64") for x in ("--case", case)]
    run = compile_script(RECIPES / "compile_kernels.py", "--arch", 90, *cases, "--processes", 1)
    assert run.returncode == 0, run.stderr
    for kernel in limits.LIMITS[90].spill_free.keys() - {"add_parts_kernel", "combine_parts_kernel"}:
        assert f"| {kernel} | bf16" in run.stdout
    for row in run.stdout.splitlines():  # each loop of a kernel has its own row
        assert (" tanh=approx " in row) == (" 1.00 tanh " in row)
    assert run.stdout.count("| forward_kernel | bf16") == 2


TUTORIAL = """
import torch
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()


@triton.jit
def _attn_bwd(Q, N: tl.constexpr, BLOCK_M1: tl.constexpr, BLOCK_N1: tl.constexpr, BLOCK_M2: tl.constexpr,
              BLOCK_N2: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    for count in tl.static_range(2):
        x = tl.zeros([16, 16], tl.float32)
        for i in range(0, tl.load(Q).to(tl.int32)):
            x = tl.dot(tl.exp2(x).to(tl.float16), tl.load(Q + at + i * 256))
        tl.store(Q + at, x)


class _attention:
    @staticmethod
    def backward(ctx, do):
        _attn_bwd[1,](do, N=2, BLOCK_M1=16, BLOCK_N1=16, BLOCK_M2=16, BLOCK_N2=16, num_warps=1)
"""


def test_a_tutorial_is_compiled_beside_the_kernels(tmp_path):
    (tmp_path / "tutorial.py").write_text(TUTORIAL)
    command = RECIPES / "compile_tutorial.py", tmp_path / "tutorial.py", "--arch", 80, "--head-dim", 16
    rows = [row.split(" | ")[2:5] for row in compile_script(*command).stdout.splitlines()[4:]]
    assert rows == [
        ["dk, dv", "tutorial", "16×16"],
        ["dq", "tutorial", "16×16"],
        ["dk, dv", "here", "64×128"],
        ["dq", "here", "128×64"],
    ]


def test_small_heads_compile_for_amd():
    run = compile_script(RECIPES / "compile_amd.py", "--case", "plain 16")
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("4 of 4 kernels compile, fit the shared memory and spill nothing.\n")


def test_a_kernel_that_spills_and_one_that_does_not_compile_are_named():
    run = compile_script(Path(__file__).parents[2] / "helpers" / "spilling.py")
    *_, shared, spills, refused = run.stderr.splitlines()  # after what libraries say when they are imported
    assert run.returncode == 1
    assert shared.startswith("forward_kernel (bf16 padded=256): ")
    assert shared.endswith("bytes of shared memory, expected at most 232,448")
    assert spills.endswith("expected at most 64, and none in the loops of tiles")
    assert refused.startswith("query_gradient_kernel (padded=256): does not compile: ")
    assert "power of 2" in refused
