"""A conversion that is killed leaves nothing, or a whole checkpoint, at its destination."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_qknorm import convert_checkpoint
from qknorm_tests.folders import contents, save_with_tokenizer
from qknorm_tests.tables import sharp_model

DATA = [{"input_ids": torch.randint(3, 60, (4, 24), generator=torch.Generator().manual_seed(i))} for i in range(2)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_with_tokenizer(sharp_model("llama", vocab_size=300), tmp_path / "source")


def convert(source: Path, out: Path, data: object) -> None:
    convert_checkpoint(source, out, "qk_norm_cap", data=data, knee=data and 0, overwrite=True)


def kills(source: Path, out: Path, data: object, count: int) -> Iterator[int]:
    """Convert in children that are killed after even shares of a conversion's time; yield the signal of each end."""
    start = time.monotonic()
    convert(source, out.with_name("timed"), data)
    seconds = time.monotonic() - start
    for moment in range(count):
        child = os.fork()
        if child == 0:
            try:
                convert(source, out, data)
            finally:
                os._exit(0)
        time.sleep(seconds * 1.2 * moment / count)
        os.kill(child, signal.SIGKILL)
        yield os.waitpid(child, 0)[1]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("data", "count"),
    [(None, 6), (DATA, 6), *(pytest.param(data, 70, marks=pytest.mark.slow) for data in (None, DATA))],
    ids=["fresh", "calibrated", "fresh, often", "calibrated, often"],
)
def test_a_kill_leaves_nothing_or_a_whole_checkpoint(source, tmp_path, data, count):
    before, out = contents(source), tmp_path / "out"
    whole, killed = None, 0
    for status in kills(source, out, data, count):
        whole = whole or contents(tmp_path / "timed")
        killed += os.WIFSIGNALED(status)
        if out.exists():
            assert contents(out) == whole
    assert killed
    assert contents(source) == before
