"""The benchmark of the C++ attention, on small cases."""

from __future__ import annotations

from argparse import Namespace

import bench_cpu as bench
import pytest
import torch

from hf_qknorm.ops.cpu import build


@pytest.mark.skipif(build._why_impossible() is not None, reason="needs the C++ kernels")
def test_the_page_has_every_ratio_and_its_limit(monkeypatch):
    rows = bench.Row(96, 16, torch.float32, 1e9, bench.LIMITS[1].names), bench.Row(64, 16, torch.bfloat16, 0.0)
    monkeypatch.setattr(bench, "LIMITS", rows)
    monkeypatch.setattr(bench, "ROTATED_LENGTHS", (64,))
    monkeypatch.setattr(bench, "BESIDE", (bench.Row(80, 16, torch.float32, 1e9),))
    monkeypatch.setattr(bench, "step_times", lambda turns: dict.fromkeys(bench.STEPS, [1.0, 1.0]))
    page = bench.report(Namespace(turns=2, threads=torch.get_num_threads()), ["--turns", "2"])
    lines = {line.split(" | ")[0].strip("| "): line for line in page.splitlines()}
    assert lines["96 tokens, head_dim 16, float32"].endswith("met |")
    assert lines["64 tokens, head_dim 16, bfloat16"].endswith("≤ 0.00: missed |")
    assert lines["80 tokens, head_dim 16, float32"].endswith("met |")
    assert "eager, cap: 96 tokens, head_dim 16, float32" in lines
    assert "≤ 1.00: " in lines["64 tokens, head_dim 64, float32"]
    assert "1.00 (1.00 to 1.00) | ≤ 1.00: met" in lines["norms and cap, hf_qknorm"]
