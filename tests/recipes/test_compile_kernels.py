"""The compile report: that every kernel keeps its limits on Hopper, and that a kernel which does not is named."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton, which compiles the kernels")
RECIPES = Path(__file__).parents[2] / "recipes"
recipe = import_module("compile_kernels")

SOUND = recipe.Report(
    kernel="forward_kernel",
    constants={"BLOCK_M": 128, "BLOCK_N": 128, "PADDED": 128, "TANH": "approx", "ONLINE": False, "CAUSAL": True},
    dtype="bf16",
    warps=8,
    stages=2,
    registers=210,
    spilled=0,
    shared=164_864,
    matrix={"HGMMA": 32},
    mufu={"ex2": 1.0, "tanh": 1.0},
    slots=6.4,
    size=1900,
)


def compile_script(*command: object) -> subprocess.CompletedProcess[str]:
    """Run where kernels are compiled: the tests' own process interprets them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(RECIPES.parent)
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, check=False
    )


def test_kernels_keep_their_limits_on_hopper():
    """Some of them: .ci/run compiles them all, and prints the table."""
    run = compile_script(RECIPES / "compile_kernels.py", "--arch", 90, "--case", "capped 128", "--case", "step 128")
    assert run.returncode == 0, run.stderr
    for kernel in recipe.SPILL_FREE:
        assert f"| {kernel} | bf16" in run.stdout


def test_a_kernel_that_spills_and_one_that_does_not_compile_are_named():
    run = compile_script(Path(__file__).with_name("spilling.py"))
    shared, spills, refused = run.stderr.splitlines()
    assert run.returncode == 1
    assert shared.startswith("forward_kernel (bf16 padded=256): ")
    assert shared.endswith("bytes of shared memory, expected at most 232,448")
    assert spills.endswith("bytes spilled, expected none")
    assert refused.startswith("query_kernel (padded=256): does not compile: ")
    assert "power of 2" in refused


def test_kernels_that_are_interpreted_are_refused():
    run = subprocess.run(
        [sys.executable, RECIPES / "compile_kernels.py"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(RECIPES.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "unset TRITON_INTERPRET" in run.stderr


def test_a_kernel_within_the_limits_passes():
    assert recipe.broken(SOUND) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"spilled": 8}, "8 bytes spilled, expected none"),
        ({"shared": 232_449}, "232,449 bytes of shared memory, expected at most 232,448"),
        ({"matrix": {"HMMA": 64}}, "no HGMMA, got {'HMMA': 64}"),
        ({"matrix": {}}, "no HGMMA, got no matrix instructions"),
        ({"slots": 7.5}, "7.50 issue slots a score, expected at most"),
        ({"slots": None}, "no main loop issue slots a score, expected at most"),
    ],
)
def test_each_limit_is_checked(changes, complaint):
    (found,) = recipe.broken(replace(SOUND, **changes))
    assert complaint in found


@pytest.mark.parametrize(
    ("kernel", "constants", "allowed"),
    [
        ("forward_kernel", {"PADDED": 256}, False),
        ("query_kernel", {"PADDED": 256}, False),
        ("key_kernel", {"PADDED": 128}, False),
        ("key_kernel", {"PADDED": 256}, True),
        ("query_kernel", {"NORM": "lp"}, True),
        ("forward_kernel", {"DROPOUT": True}, True),
    ],
)
def test_where_spills_are_allowed(kernel, constants, allowed):
    report = replace(SOUND, kernel=kernel, constants=SOUND.constants | constants, spilled=8)
    assert (recipe.broken(report) == []) == allowed


@pytest.mark.parametrize(
    ("tanh", "online", "slots"), [("approx", False, 7.1), ("none", False, 5.1), ("none", True, 8.4)]
)
def test_each_loop_has_its_own_limit_of_slots(tanh, online, slots):
    report = replace(SOUND, constants=SOUND.constants | {"TANH": tanh, "ONLINE": online})
    assert recipe.broken(replace(report, slots=slots))
    assert recipe.broken(replace(report, slots=slots - 0.7)) == []


def test_fp32_has_no_limits_but_shared_memory():
    report = replace(SOUND, dtype="fp32", matrix={}, spilled=3000, slots=None)
    assert recipe.broken(report) == []
    assert recipe.broken(replace(report, shared=300_000))


def test_a_limit_that_nothing_was_measured_by_is_named():
    everything = [*recipe.SPILL_FREE, *recipe.SLOTS]
    met = ["forward_kernel", ("approx", False)]
    assert set(recipe.unmet([SOUND])) == {f"no limit was checked of {x}" for x in everything if x not in met}
    assert len(recipe.unmet([replace(SOUND, dtype="fp32")])) == len(everything)


def test_elsewhere_everything_must_only_compile():
    assert recipe.complain(replace(SOUND, spilled=8), 80) == []
    assert recipe.complain(recipe.Failure("forward_kernel", "bf16", "OutOfResources"), 80) == [
        "forward_kernel (bf16): does not compile: OutOfResources"
    ]
