"""The benchmark of generation, on a small model."""

from __future__ import annotations

from argparse import Namespace

import bench_generation as bench
from transformers import LlamaConfig, LlamaForCausalLM


def test_the_page_has_every_model_and_work(monkeypatch, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256)).save_pretrained(tmp_path / "small")
    work, limit = bench.WORK["a prompt of 1,024 tokens"]
    monkeypatch.setattr(bench, "WORK", {"steps": (lambda model: bench.steps(model, 8), 1e9), "a prompt": (work, 0.0)})
    page = bench.report(Namespace(model=str(tmp_path / "small"), turns=2), ["--turns", "2"])
    assert "Of small, in fp32" in page
    for name in set(bench.MODELS) - {bench.PLAIN}:
        lines = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        assert [line.rsplit(": ", 1)[1] for line in lines] == ["met |", "missed |"]
