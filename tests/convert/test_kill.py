"""A conversion that is killed leaves nothing, or a whole checkpoint, at its destination."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_qknorm import convert_checkpoint
from qknorm_tests.folders import contents
from qknorm_tests.tables import random_tokens

DATA = [{"input_ids": random_tokens(4, 24, seed)} for seed in range(2)]


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
    [(None, 6), *(pytest.param(data, 30, marks=pytest.mark.slow) for data in (None, DATA))],
    ids=["fresh", "fresh, often", "calibrated, often"],
)
def test_a_kill_leaves_nothing_or_a_whole_checkpoint(llama, tmp_path, data, count):
    before, out = contents(llama), tmp_path / "out"
    whole, killed = None, 0
    for status in kills(llama, out, data, count):
        whole = whole or contents(tmp_path / "timed")
        killed += os.WIFSIGNALED(status)
        if out.exists():
            assert contents(out) == whole
    assert killed
    assert contents(llama) == before
