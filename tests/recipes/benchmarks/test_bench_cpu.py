"""The benchmark of the C++ attention, on small cases."""

from __future__ import annotations

import bench_cpu as bench
import pytest
import torch

from hf_qknorm.ops.cpu import build


@pytest.mark.skipif(build._why_impossible() is not None, reason="needs the C++ kernels")
def test_the_page_has_every_implementation(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "ROWS", (bench.Row(96, 16, torch.float32, bench.ALL), bench.Row(64, 16, torch.bfloat16)))
    monkeypatch.setattr(bench, "ROTATED_LENGTHS", (64,))
    monkeypatch.setattr(bench, "step_times", lambda turns: dict.fromkeys(bench.STEPS, [1.0, 1.0]))
    page = bench.main(["--turns", "2", "--output", str(tmp_path / "cpu")])
    assert (tmp_path / "cpu.md").read_text() == page
    for name in bench.ALL:
        assert f"\n| 96 tokens, head_dim 16, float32 | {name} | " in page
    assert f"| 64 tokens, head_dim 16, bfloat16 | {bench.CPP} | " in page
    assert f"\n| 64 tokens | {bench.NORMED} | " in page
    assert "| norms and cap, hf_qknorm | 1.0 (1.0 to 1.0) | 1.00 (1.00 to 1.00) |" in page
