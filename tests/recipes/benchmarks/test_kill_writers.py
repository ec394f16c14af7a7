"""Killing writers: a few kills of each kind, and the detection of forbidden outcomes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import kill_writers
import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.mark.slow
def test_a_killed_writer_leaves_nothing_the_old_or_the_new():
    """In a process of its own, which forks before any thread exists."""
    command = [sys.executable, kill_writers.__file__, "--count", "1", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines()[2:] if line]
    assert len(rows) == 5
    for _, kills, *outcomes in rows:
        assert int(kills) == sum(map(int, outcomes)) == 1


def test_a_writer_that_is_not_atomic_is_found(tmp_path):
    def write(folder: Path) -> None:
        folder.mkdir()
        for i in range(200):
            (folder / str(i)).write_text("x")
            time.sleep(0.01)

    writer = kill_writers.Writer(write)
    (tmp_path / "whole" / "out").mkdir(parents=True)
    (tmp_path / "killed").mkdir()
    outcome, fault = kill_writers.kill(writer, tmp_path / "killed", tmp_path / "whole" / "out", 0.3, after_first=True)
    assert outcome == "fault"
    assert fault.startswith("0")


def test_a_writer_that_fails_by_itself_is_found(tmp_path):
    writer = kill_writers.Writer(lambda folder: 1 / 0)
    outcome, fault = kill_writers.kill(writer, tmp_path, tmp_path, 0.3, after_first=True)
    assert outcome == "fault"
    assert "ZeroDivisionError" in fault
