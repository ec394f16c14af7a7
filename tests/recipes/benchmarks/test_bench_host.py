"""The host's time of a layer: one small run, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "recipes" / "benchmarks"


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[list[str]]:
    """The cells of the page's table; a process of its own, as kernels interpreted in this one can't be compiled."""
    page = tmp_path_factory.mktemp("host") / "host.md"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(BENCHMARKS / "bench_host.py"), "--turns", "2", "--work", "decode, static cache"]
    subprocess.run([*command, "--output", str(page)], check=True, capture_output=True, env=environment)
    lines = [line for line in page.read_text().splitlines() if line.startswith("| decode")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_layer_has_its_time_and_its_ratio(rows):
    layers = ["projections alone", "SDPA", "RMSNorm, SDPA", "hf_qknorm, norms", "hf_qknorm, norms and cap"]
    assert [row[1] for row in rows] == layers
    least, baseline = (float(row[2]) for row in rows[:2])
    for _, _, median, _, ratio, beyond, _ in rows:
        assert float(ratio) == pytest.approx(float(median) / baseline, rel=0.2)  # both are rounded
        assert float(beyond) == pytest.approx(float(median) - least, abs=2)


def test_a_decode_step_has_two_launches(rows):
    assert [row[-1] for row in rows[:3]] == ["none"] * 3
    assert {row[-1] for row in rows[3:]} == {"1 norm_rope_kernel, 1 split_kernel"}
