"""Killing writers: a few kills of each kind, and the detection of forbidden outcomes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import checkpoint_writers
import kill_writers
import pytest
import torch
from tiny import tiny_model

from hf_qknorm import patch_model

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
MOMENT = kill_writers.Moment(after_first=True, seconds=0.3)


@pytest.mark.slow
def test_a_killed_writer_leaves_nothing_the_old_or_the_new():
    """In a process of its own, which forks before any thread exists."""
    command = [sys.executable, kill_writers.__file__, "--count", "7", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 7
    for _, kills, *outcomes in rows:
        assert int(kills) == sum(map(int, outcomes)) == 1


def test_a_writer_that_is_not_atomic_is_found(tmp_path):
    def write(folder: Path) -> None:
        folder.mkdir()
        for i in range(200):
            (folder / str(i)).write_text("x")
            time.sleep(0.01)

    writer = checkpoint_writers.Writer(write, checkpoint_writers.judge_bytes, checkpoint_writers.ATOMIC)
    (tmp_path / "whole" / "out").mkdir(parents=True)
    (tmp_path / "killed").mkdir()
    outcome, fault = kill_writers.kill(writer, tmp_path / "killed", tmp_path / "whole" / "out", MOMENT)
    assert outcome == "fault"
    assert fault.startswith("fault: 0")


def test_a_writer_that_fails_by_itself_is_found(tmp_path):
    writer = checkpoint_writers.Writer(lambda folder: 1 / 0, checkpoint_writers.judge_bytes, checkpoint_writers.ATOMIC)
    outcome, fault = kill_writers.kill(writer, tmp_path, tmp_path, MOMENT)
    assert outcome == "fault"
    assert "ZeroDivisionError" in fault


@pytest.mark.parametrize(
    ("harm", "outcome"),
    [
        (lambda left: None, "new"),
        (lambda left: [file.unlink() for file in left.iterdir()], "nothing"),
        (lambda left: (left / "model.safetensors.index.json").unlink(), "refused"),
        (lambda left: next(left.glob("*.safetensors")).write_bytes(b"x"), "refused"),
        (lambda left: (left / "generation_config.json").unlink(), "usable"),
    ],
)
def test_a_partial_checkpoint_is_classified_by_loading_it(harm, outcome, tmp_path):
    model = patch_model(tiny_model("llama"), "qk_norm")
    for name in ("whole", "left"):
        model.save_pretrained(tmp_path / name, max_shard_size="60KB")
    harm(tmp_path / "left")
    assert checkpoint_writers.judge_saved(tmp_path / "left", tmp_path / "whole") == outcome


def test_other_weights_are_a_fault(tmp_path):
    model = patch_model(tiny_model("llama"), "qk_norm")
    model.save_pretrained(tmp_path / "whole")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path / "left")
    assert checkpoint_writers.judge_saved(tmp_path / "left", tmp_path / "whole") == "fault"
