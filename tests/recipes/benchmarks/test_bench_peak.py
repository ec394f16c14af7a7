"""The benchmark against the peak of the cores, on a small case."""

from __future__ import annotations

from argparse import Namespace

import bench_peak as bench
import pytest

from hf_qknorm.ops.cpu import build


@pytest.mark.skipif(build._why_impossible() is not None, reason="needs the C++ kernels")
def test_the_page_has_every_pass(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 1 << 12)
    page = bench.report(Namespace(threads=[1], turns=3, lengths=[64]), [])
    rows = {line.split(" | ")[0].strip("| "): line for line in page.splitlines() if line.startswith("| ")}
    assert rows["peak"].endswith("1.00 (1.00 to 1.00) |")
    names = {f"{name}, 64 tokens, head_dim {d}" for name in ("forward", "backward") for d in (64, 128)}
    assert names | {"matrix product"} <= set(rows)
