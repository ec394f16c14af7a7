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
    cases = [x for case in ("capped 64", "step 64", "gluon, uncapped") for x in ("--case", case)]
    run = compile_script(RECIPES / "compile_kernels.py", "--arch", 90, *cases, "--processes", 1)
    assert run.returncode == 0, run.stderr
    for kernel in limits.LIMITS[90].spill_free:
        assert f"| {kernel} | bf16" in run.stdout
    for row in run.stdout.splitlines():  # each loop of a kernel has its own row
        assert (" tanh=approx " in row) == (" 1.00 tanh " in row)
    assert run.stdout.count("| forward_kernel | bf16") == 2


def test_a_kernel_that_spills_and_one_that_does_not_compile_are_named():
    run = compile_script(Path(__file__).parents[2] / "qknorm_tests" / "spilling.py")
    *_, shared, spills, refused = run.stderr.splitlines()  # after what libraries say when they are imported
    assert run.returncode == 1
    assert shared.startswith("forward_kernel (bf16 padded=256): ")
    assert shared.endswith("bytes of shared memory, expected at most 232,448")
    assert spills.endswith("expected at most 64, and none in the loops of tiles")
    assert refused.startswith("query_gradient_kernel (padded=256): does not compile: ")
    assert "power of 2" in refused
