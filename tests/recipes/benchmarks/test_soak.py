"""The soak test, shortened, in a process of its own, and its detection of leaks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if not Path("/proc/self/statm").exists():
    pytest.skip("what a process holds is counted on Linux only", allow_module_level=True)

import soak
import torch

SHORT = ["--steps", "200", "--cycles", "50", "--generations", "20"]  # a tenth


@pytest.mark.slow
def test_nothing_grows():
    run = subprocess.run([sys.executable, soak.__file__, *SHORT], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("| flat |") == 3 * len(soak.held())


LEAKS: dict[str, Callable[[], object]] = {
    "memory": lambda: bytearray(b"x" * 2**23),
    "open files": lambda: os.open(os.devnull, os.O_RDONLY),
    "tensors": lambda: torch.ones(1),
    "modules": torch.nn.Identity,
    "classes": lambda: type("Leak", (), {}),
}


def test_leaks_are_detected(monkeypatch):
    """Each leak moves a count of its own."""
    monkeypatch.setattr(soak, "POINTS", 4)
    hooked = torch.nn.Identity()  # made here: what imports make is not counted
    leaks = LEAKS | {"hooks": lambda: hooked.register_forward_hook(lambda *_: None)}
    kept: list[dict[str, Any]] = []
    try:
        grown = soak.soak("leaks", 16, lambda _: kept.append({name: leak() for name, leak in leaks.items()}))
    finally:
        for leaked in kept:
            os.close(leaked["open files"])
    assert {one.name for one in grown if one.grows} >= leaks.keys()


def test_a_slope_is_not_moved_by_an_odd_point():
    assert soak.slope([0.0, 1.0, 2.0, 900.0, 4.0, 5.0, 6.0]) == 1
    assert soak.slope([5.0, 5.0, 5.0, 0.0, 5.0, 5.0]) == 0
