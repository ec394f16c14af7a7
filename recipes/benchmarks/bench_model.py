"""Benchmark a training step of a Llama, with norms and a cap on its attention, beside the unpatched model.

    python recipes/benchmarks/bench_model.py --size 135m --output step.md

All models take turns: forward, backward and AdamW's update on random tokens, with random weights. Times are medians
(fastest to slowest). "1b" has the shape of Llama 3.2 1B, "135m" that of SmolLM2. Without a GPU the models are tiny, and
their times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from page import provenance, publish, table
from timing import Clock, Run, cell
from transformers import LlamaConfig, LlamaForCausalLM

import hf_qknorm as qk

SCHEME = "qk_norm_cap"
BACKEND = "hf_qknorm_triton" if torch.cuda.is_available() else "hf_qknorm"  # without a fallback on a GPU
SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES = {  # the shape, the vocabulary, and the batch `[B, T]`
    "1b": ((2048, 8192, 16, 32, 8), 128_256, (4, 4096)),
    "135m": ((576, 1536, 30, 9, 3), 49_152, (8, 2048)),
    "tiny": ((64, 96, 2, 4, 2), 257, (1, 24)),
}
STEPS = {  # whether the model is patched, and compiled
    "unpatched, sdpa": (False, False),
    f"ours: {SCHEME}": (True, False),
    "unpatched, sdpa, torch.compile": (False, True),
    f"ours: {SCHEME}, torch.compile": (True, True),
}


def training(name: str, size: str, device: torch.device) -> Callable[[int], None]:
    """A function that takes a training step; the model is built by its first call, with the same weights for all."""
    (patched, compiled), (shape, vocabulary, batch) = STEPS[name], SIZES[size]
    batches = [torch.randint(vocabulary, batch, device=device) for _ in range(2)]

    @cache
    def build() -> tuple[Any, torch.optim.Optimizer]:
        sizes = dict(zip(SHAPE, shape, strict=True)) | {"vocab_size": vocabulary, "tie_word_embeddings": True}
        torch.manual_seed(0)
        with device:
            model: Any = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=max(batch[1], 64)))
        model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).train()
        if patched:
            qk.patch_model(model, SCHEME, attn_implementation=BACKEND)
        if compiled:  # without a GPU what matters is that it can be traced
            model.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run(n: int) -> None:
        model, optimizer = build()
        ids = batches[n % len(batches)]
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=("1b", "135m"), default="1b")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the Markdown there as well")
    args = parser.parse_args(arguments)
    size, device = (args.size, torch.device("cuda")) if torch.cuda.is_available() else ("tiny", torch.device("cpu"))
    runs = {name: Run(training(name, size, device)) for name in STEPS}
    Clock(device).race(runs, 10 if size != "tiny" else 2)
    rows, (base, *_) = [], runs.values()
    for name, run in runs.items():
        ratio = "" if run.failure or base.failure else f"{run.median / base.median:.2f}"
        peak = "" if run.peak_mib is None else f"{run.peak_mib:,.0f}"
        rows.append([name, run.failure or cell(run.times), peak, ratio])
    lines = table(["", "ms", "MiB", "of the unpatched model's time"], rows)
    publish("A training step", __doc__, f"{size}: {SIZES[size]}; {provenance()}", lines, args.output)
    return int(any(run.failure for name, run in runs.items() if name.startswith("ours")))


if __name__ == "__main__":
    sys.exit(main())
