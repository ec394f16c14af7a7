"""Benchmark a training step of a Llama, with norms and a cap on its attention, beside the unpatched model.

    python recipes/benchmarks/bench_model.py --size 135m --output step.md

All models take turns: forward, backward and AdamW's update on random tokens, with random weights. Times are medians
(fastest to slowest). Without a GPU the models are tiny, and their times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from page import opening, provenance, publish, table
from timing import Clock, Run, cell
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_qknorm as qk

SCHEME = "qk_norm_cap"
BACKEND = "hf_qknorm_triton" if torch.cuda.is_available() else "hf_qknorm"  # without a fallback on a GPU


@dataclass(frozen=True)
class Size:
    """A Llama's shape and batch; the defaults are Llama 3.2 1B's, those of "135m" SmolLM2's."""

    hidden: int = 2048
    inner: int = 8192
    layers: int = 16
    heads: int = 32
    heads_kv: int = 8
    vocabulary: int = 128_256
    batch: int = 4
    length: int = 4096

    def build(self, device: torch.device, dtype: torch.dtype, backend: str, patched: bool) -> nn.Module:
        """A model with random weights, the same for all backends."""
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads_kv,
            vocab_size=self.vocabulary,
            max_position_embeddings=max(self.length, 64),
            tie_word_embeddings=True,
        )
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        with device:
            model: Any = LlamaForCausalLM(config).to(dtype)
        if patched:
            qk.patch_model(model, SCHEME)
            model.set_attn_implementation(backend)
        model.config.use_cache = False
        return model.train()

    def tokens(self, device: torch.device) -> Tensor:
        return torch.randint(self.vocabulary, (self.batch, self.length), device=device)


@dataclass(frozen=True)
class Step:
    """One way to train it."""

    name: str
    patched: bool
    compiled: bool = False


SIZES = {
    "1b": Size(),
    "135m": Size(hidden=576, inner=1536, layers=30, heads=9, heads_kv=3, vocabulary=49_152, batch=8, length=2048),
}
TINY = Size(hidden=64, inner=96, layers=2, heads=4, heads_kv=2, vocabulary=257, batch=1, length=24)
PLAIN = (Step("unpatched, sdpa", False), Step(f"ours: {SCHEME}", True))
STEPS = (
    *PLAIN,
    Step("unpatched, sdpa, torch.compile", False, True),
    Step(f"ours: {SCHEME}, torch.compile", True, True),
)


def training(step: Step, size: Size, device: torch.device, dtype: torch.dtype) -> Callable[[int], None]:
    """A function that takes a training step; the model is built by its first call."""
    made: list[Any] = []
    batches = [size.tokens(device) for _ in range(2)]

    def run(n: int) -> None:
        if not made:
            model: Any = size.build(device, dtype, BACKEND, step.patched)
            if step.compiled:  # without a GPU what matters is that it can be traced
                model.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
            made.extend((model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)))
        model, optimizer = made
        ids = batches[n % len(batches)]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="1b", help="default: 1b, with torch.compile beside it")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the Markdown there as well")
    args = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    size, device, dtype = (SIZES[args.size], "cuda", torch.bfloat16) if cuda else (TINY, "cpu", torch.float32)
    steps = STEPS if args.size == "1b" else PLAIN
    runs = {step.name: Run(training(step, size, torch.device(device), dtype)) for step in steps}
    Clock(torch.device(device)).race(runs, 10 if cuda else 2)
    rows, base = [], runs[STEPS[0].name]
    for name, run in runs.items():
        ratio = "" if run.failure or base.failure else f"{run.median / base.median:.2f}"
        peak = "" if run.peak_mib is None else f"{run.peak_mib:,.0f}"
        rows.append([name, run.failure or cell(run.times), peak, ratio])
    page = opening("A training step", __doc__, f"{size}, {dtype}; {provenance()}")
    publish([*page, *table(["", "ms", "MiB", "of the unpatched model's time"], rows)], args.output)
    return int(any(run.failure for name, run in runs.items() if name.startswith("ours")))


if __name__ == "__main__":
    sys.exit(main())
