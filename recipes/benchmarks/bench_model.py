"""Benchmark a training step of a Llama, with norms and a cap on its attention, beside the unpatched model.

    python recipes/benchmarks/bench_model.py --size 135m --losses 100 --output step.md

Logits and gradients are first checked against eager attention in fp64, on a small model. All models then take turns.
With `--losses`, each one then trains from the same random weights, in bf16 autocast over fp32 weights, on the bytes of
this repository's Python files. Without a GPU the models are tiny, and their times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import test_helpers_path  # noqa: F401
import torch
from bench_cases import judge
from bench_timing import Clock, Run
from machine import made
from markdown_table import publish, table
from run_log import provenance
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_qknorm as qk
from qknorm_tests.error_budget import Verdict

SCHEME = "qk_norm_cap"
RATE, WARMUP = 6e-4, 0.1  # of AdamW, and the share of the steps in which it rises
ROOT = Path(__file__).parents[2]
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

    def at(self, length: int) -> Size:
        """The same attention in a small model, whose logits are known in fp64."""
        return replace(self, layers=2, inner=512, vocabulary=509, batch=1, length=min(length, self.length))

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


class Training:
    """A model in training; `run` takes a step."""

    def __init__(self, step: Step, size: Size, device: torch.device, dtype: torch.dtype) -> None:
        self.step, self.size, self.device, self.dtype = step, size, device, dtype
        self.batches = [size.tokens(device) for _ in range(2)]

    @cached_property
    def model(self) -> Any:
        model = self.size.build(self.device, self.dtype, BACKEND, self.step.patched)
        if self.step.compiled:  # without a GPU what matters is that it can be traced
            model.compile(backend="inductor" if self.device.type == "cuda" else "aot_eager")
        return model

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def run(self, n: int) -> None:
        ids = self.batches[n % len(self.batches)]
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def check(size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Verdict]:
    """Logits and gradients of a patched model against its eager attention in fp64 and in `dtype`."""

    def results(dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
        model = size.build(device, rounded, backend, True).to(dtype)
        out = model(input_ids=ids, labels=ids)
        attention = model.model.layers[0].self_attn
        weights = {"q_norm": attention.q_norm.weight, "k_proj": attention.k_proj.weight}
        gradients = torch.autograd.grad(out.loss, list(weights.values()))
        return {"logits": out.logits.detach(), **dict(zip(weights, gradients, strict=True))}

    rounded, ids = dtype, size.tokens(device)
    got = results(dtype, BACKEND)
    return judge(got, results(torch.float64, "hf_qknorm_eager"), results(dtype, "hf_qknorm_eager"))


def losses(step: Step, size: Size, device: torch.device, steps: int) -> list[float]:
    """The losses of a training run in nats a byte, on the same batches for each step."""
    files = sorted(file for folder in ("hf_qknorm", "recipes", "tests") for file in ROOT.glob(f"{folder}/**/*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    generator, found = torch.Generator().manual_seed(0), []
    model = size.build(device, torch.float32, BACKEND, step.patched)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    for n in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (n + 1) / (WARMUP * steps))
        start = torch.randint(len(text) - size.length, (size.batch,), generator=generator)
        ids = text[start[:, None] + torch.arange(size.length)].to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def loss_table(size: Size, device: torch.device, steps: int) -> list[str]:
    """The mean loss of each tenth of the steps."""
    tenth, rows = max(steps // 10, 1), []
    for step in PLAIN:
        found = losses(step, size, device, steps)
        means = (sum(found[n : n + tenth]) / tenth for n in range(0, steps - tenth + 1, tenth))
        rows.append([step.name, *(f"{mean:.3f}" for mean in means)])
    head = ["", *(f"{n + 1} to {n + tenth}" for n in range(0, steps - tenth + 1, tenth))]
    return [f"Mean losses over steps, in nats a byte, AdamW at {RATE:g}:", "", *table(head, rows)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="1b", help="default: 1b, with torch.compile beside it")
    parser.add_argument("--losses", type=int, default=0, metavar="STEPS", help="train so many steps too")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the Markdown there as well")
    args = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    size, device, dtype = (SIZES[args.size], "cuda", torch.bfloat16) if cuda else (TINY, "cpu", torch.float32)
    steps = STEPS if args.size == "1b" else PLAIN
    verdicts = check(size.at(512), torch.device(device), dtype)
    errors = ", ".join(f"{name} {x.error:.1e} of {x.budget:.1e}" for name, x in verdicts.items())
    if not all(verdict.passed for verdict in verdicts.values()):
        print(f"over the error budget: {errors}", file=sys.stderr)
        return 1
    runs = {step.name: Run(Training(step, size, torch.device(device), dtype).run) for step in steps}
    Clock(torch.device(device)).race(runs, 1.5)
    rows, base = [], runs[STEPS[0].name]
    for name, run in runs.items():
        ratio = "" if run.failure or base.failure else f"{run.median / base.median:.2f}"
        peak = "" if run.peak_mib is None else f"{run.peak_mib:,.0f}"
        rows.append([name, run.failure or f"{run.median:.1f}", peak, ratio])
    page = ["# A training step", "", f"{size}, {dtype}; {provenance([{'made': made()}])} Errors: {errors}.", ""]
    page += table(["", "ms", "MiB", "of the unpatched model's time"], rows)
    failed = any(run.failure for name, run in runs.items() if name.startswith("ours"))
    runs.clear()  # and the models with them
    if args.losses:
        page += loss_table(size, torch.device(device), args.losses)
    publish("\n".join(page), args.output)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
