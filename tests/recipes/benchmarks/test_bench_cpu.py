"""The benchmark of the C++ attention, on small cases."""

import bench_cpu as bench
import pytest
import torch

from hf_qknorm.ops.cpu import build


@pytest.mark.slow
@pytest.mark.skipif(build._why_impossible() is not None, reason="needs the C++ kernels")
def test_the_page_has_every_implementation(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "ROWS", (bench.Row(96, 16, torch.float32, bench.ALL), bench.Row(64, 16, torch.bfloat16)))
    monkeypatch.setattr(bench, "ROTATED_LENGTHS", (64,))
    monkeypatch.setattr(bench, "CACHED", (8,))
    monkeypatch.setattr(bench, "MODELS", dict.fromkeys((bench.PLAIN,), (None, "sdpa")))
    monkeypatch.setattr(bench, "peak_rise", lambda build: 100)
    page = bench.main(["--turns", "2", "--output", str(tmp_path / "cpu")])
    assert (tmp_path / "cpu.md").read_text() == page
    for name in bench.ALL:
        assert f"\n| 96 tokens, head_dim 16, float32 | {name} | " in page
    assert f"| 64 tokens, head_dim 16, bfloat16 | {bench.CPP} | " in page
    assert f"\n| 64 tokens | {bench.NORMED} | " in page
    assert f"\n| 2 × 512 tokens | {bench.PLAIN} | " in page
    assert f"\n| 10 steps over 8 keys | {bench.PLAIN} | " in page
    assert f"\n| {bench.PLAIN} | 100 (1.00) | 100 (1.00) |" in page
