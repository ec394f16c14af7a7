"""Benchmark attention on the CPU: in C++ and tiled, with a cap, against torch's SDPA without one and eager attention.

    python recipes/benchmarks/bench_cpu.py --output recipes/results/cpu.md

In each row the implementations take turns in one process. A ratio is the median of the ratios within the turns, with
its quartiles, so that a slow moment of the machine is in both. The limits were set before the first run. With
ATEN_CPU_CAPABILITY=avx2 it measures AVX2; SDPA's matrix products, in MKL and oneDNN, keep AVX-512. Threads that wait
for each other suffer from other programs: run it on a quiet machine. The page says how busy others were.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import test_helpers_path  # noqa: F401
import torch
import torch.nn.functional as F
from machine import Times, beside_others, by_turns, made
from markdown_table import publish, table
from run_log import provenance
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import hf_qknorm as qk
from hf_qknorm.ops import library, reference
from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.cpu import norm_rope
from hf_qknorm.ops.types import Call, Heads, Norm, Options, Rotary, Visible
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.random_qkv import make_qkv

HEADS, CAP = 8, 50.0
CPP, SDPA, EAGER, TILED = "C++, cap", "SDPA, no cap", "eager, cap", "tiled, cap"
NORMED, ROTATED = "C++, norms, RoPE, cap", "SDPA, RoPE"
PLAIN = "unpatched, sdpa"
STEPS = {  # scheme and backend of a training step
    "norms and cap, hf_qknorm": ("qk_norm_cap", "hf_qknorm"),
    "norms, hf_qknorm": ("qk_norm", "hf_qknorm"),
    "norms, sdpa": ("qk_norm", "sdpa"),
    "unpatched, hf_qknorm": (None, "hf_qknorm"),
    PLAIN: (None, "sdpa"),
}


class Row(NamedTuple):
    """A measured shape, and the largest C++ ÷ SDPA that is allowed for it."""

    length: int
    head_dim: int
    dtype: torch.dtype
    limit: float
    names: tuple[str, ...] = (CPP, SDPA)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.length:,} tokens, head_dim {self.head_dim}, {dtype}"


F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
LIMITS = (
    Row(512, 64, F32, 0.85),
    Row(1024, 64, F32, 0.75, (CPP, SDPA, EAGER, TILED)),
    Row(1024, 128, F32, 0.75),
    Row(4096, 64, F32, 0.90, (CPP, SDPA, EAGER, TILED)),
    Row(4096, 128, F32, 0.90),
    Row(1024, 64, BF16, 1.00),
    Row(4096, 64, BF16, 1.00),
)
ROTATED_LENGTHS = (512, 1024, 4096)
BESIDE = (Row(1024, 64, F32, 1.00), Row(4096, 64, F32, 1.00))  # their limits: C++'s slowdown over SDPA's
BESIDE_TURNS = 9
EAGER_LIMIT, STEP_LIMIT, ROTATED_LIMIT = 6.5, 1.00, 1.00


def implementations(length: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """All causal; the plain one, with a cap, is that of Gemma 2 in transformers."""
    hidden = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
        return torch.matmul(torch.softmax(torch.tanh(logits / CAP) * CAP + hidden, dim=-1), v)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Call:
        return Call(Heads(q, k, v), Visible(), Options(q.shape[-1] ** -0.5, CAP, causal=True))

    return {
        CPP: lambda q, k, v: cpu.attention(call(q, k, v)),
        SDPA: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        EAGER: eager,
        TILED: lambda q, k, v: library.attention(*call(q, k, v)),
    }


def rotated_times(length: int, turns: int) -> Times:
    """Forward and backward with RoPE and, in C++, norms with gains, as a patched Llama trains."""
    compared = implementations(length)
    rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=64))
    q, k, v = make_qkv(1, HEADS, HEADS, length, length, 64)
    positions = rotary(q, torch.arange(length)[None])
    angles = Rotary(*(x[..., :32] for x in positions))
    gains = [torch.ones(64, requires_grad=True) for _ in range(2)]

    def normed(q: Tensor, k: Tensor, v: Tensor, *gains: Tensor) -> Tensor:
        q_norm, k_norm = (Norm("rms", gain) for gain in gains)
        return compared[CPP](*norm_rope.norm_rope(Heads(q, k, v, q_norm, k_norm, angles)), v)

    def rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compared[SDPA](*apply_rotary_pos_emb(q, k, *positions), v)

    ours, theirs = (q, k, v, *gains), (q, k, v)
    runs = {NORMED: lambda: forward_backward(normed, ours), ROTATED: lambda: forward_backward(rotated, theirs)}
    return by_turns(runs, turns)


def forward_backward(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    out = attend(*inputs)
    torch.autograd.grad(out, inputs, out.detach())


def attention_times(row: Row, turns: int) -> Times:
    """Forward and backward of each implementation, after a check against the oracle."""
    inputs = make_qkv(1, HEADS, HEADS, row.length, row.length, row.head_dim, dtype=row.dtype)
    compared = implementations(row.length)
    for name in {CPP, TILED} & {*row.names}:
        check(row, compared[name])
    runs = {name: lambda name=name: forward_backward(compared[name], inputs) for name in row.names}
    return by_turns(runs, turns)


def check(row: Row, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Raise AssertionError unless output and gradients are within the error budget, for 256 tokens."""
    inputs = make_qkv(1, HEADS, HEADS, 256, 256, row.head_dim, dtype=row.dtype)

    def results(attend: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        tensors = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = attend(*tensors)
        return out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out))

    def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, softcap=CAP, causal=True).out

    three = results(attend, row.dtype), results(oracle, torch.float64), results(oracle, row.dtype)
    for name, *result in zip(("out", "dq", "dk", "dv"), *three, strict=True):
        assert_within_budget(*result, name)


def step_times(turns: int) -> Times:
    """A training step of a Llama of 4 layers with 8 heads of 64, on 2 texts of 512 tokens."""
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=2048)
    tokens = torch.randint(2048, (2, 512), generator=torch.Generator().manual_seed(0))
    runs: dict[str, Callable[[], object]] = {}
    for name, (scheme, backend) in STEPS.items():
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
        if scheme is None:
            model.set_attn_implementation(backend)
        else:
            qk.patch_model(model, scheme, attn_implementation=backend)
        runs[name] = training_step(model.train(), tokens)
    return by_turns(runs, turns)


def training_step(model: Any, tokens: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that keeps one core busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def beside_times(turns: int) -> dict[Row, tuple[Times, Times]]:
    """The times of attention alone, and beside a busy process."""
    alone = {row: attention_times(row, turns) for row in BESIDE}
    with busy_process():
        return {row: (times, attention_times(row, turns)) for row, times in alone.items()}


def beside_table(measured: dict[Row, tuple[Times, Times]]) -> list[str]:
    rows = []
    for row, (alone, beside) in measured.items():
        slower = {name: statistics.median(beside[name]) / statistics.median(alone[name]) for name in (CPP, SDPA)}
        cells = (f"{slower[name]:.2f} ({cell(beside[name])} ms)" for name in (CPP, SDPA))
        ratio = slower[CPP] / slower[SDPA]
        rows.append((str(row), *cells, f"{ratio:.2f}", verdict(ratio, row.limit)))
    head = ("beside a process that keeps one core busy, over the time alone", CPP, SDPA, "C++ ÷ SDPA", "limit")
    return table(head, rows)


def quartiles(times: list[float], others: list[float]) -> tuple[float, float, float]:
    """The quartiles of the first over the second within the turns."""
    ratios = [mine / other for mine, other in zip(times, others, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, median, high


def cell(times: list[float]) -> str:
    return f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"


def ratio_cell(times: list[float], others: list[float]) -> str:
    low, median, high = quartiles(times, others)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def verdict(value: float, limit: float, *, at_least: bool = False) -> str:
    met = value >= limit if at_least else value <= limit
    return f"{'≥' if at_least else '≤'} {limit:.2f}: {'met' if met else 'missed'}"


def compared_cells(times: Times, first: str, second: str, limit: float) -> tuple[str, ...]:
    """Both times, their ratio, and whether it is within the limit."""
    ours, theirs = times[first], times[second]
    found = verdict(quartiles(ours, theirs)[1], limit)
    return cell(ours), cell(theirs), ratio_cell(ours, theirs), found


def ratio_table(title: str, measured: dict[Row, Times]) -> list[str]:
    head = (title, f"{CPP}, ms", f"{SDPA}, ms", "C++ ÷ SDPA", "limit")
    return table(head, [(str(x), *compared_cells(times, CPP, SDPA, x.limit)) for x, times in measured.items()])


def attention_tables(measured: dict[Row, Times]) -> list[str]:
    lines = ratio_table("forward + backward", measured)
    rows = []
    for row, times in measured.items():
        for name in set(times) & {EAGER, TILED}:
            eager = verdict(quartiles(times[name], times[CPP])[1], EAGER_LIMIT, at_least=True)
            ratios = (ratio_cell(times[name], times[other]) for other in (SDPA, CPP))
            rows.append((f"{name}: {row}", cell(times[name]), *ratios, eager if name == EAGER else ""))
    return [*lines, *table(("forward + backward", "ms", "÷ SDPA", "÷ C++", "limit"), sorted(rows))]


def measure(turns: int) -> tuple[dict[Row, Times], dict[int, Times], Times]:
    """The times of attention, of attention with RoPE by length, and of training steps."""
    attention = {row: attention_times(row, turns if row.length <= 1024 else 5) for row in LIMITS}
    rotated = {length: rotated_times(length, turns if length <= 1024 else 5) for length in ROTATED_LENGTHS}
    return attention, rotated, step_times(turns)


def report(args: argparse.Namespace, arguments: list[str]) -> str:
    """Measure everything; return a Markdown page."""
    (quiet, rotated, step), busy = beside_others(lambda: measure(args.turns))
    lines = [
        "# Attention on the CPU in C++",
        "",
        f"`python recipes/benchmarks/bench_cpu.py {' '.join(arguments)}`".rstrip(),
        "",
        f"{busy}; {provenance([{'made': made()}])}",
        "",
        f"Causal, batch 1, {HEADS} heads; a cap of {CAP:g} in all but SDPA, which has none. {args.turns} turns (5 for "
        f"4,096 tokens, {min(args.turns, BESIDE_TURNS)} beside a busy process). Times are medians (fastest to "
        "slowest), ratios medians within the turns (quartiles). All are within the error budget of the oracle.",
        "",
        *attention_tables(quiet),
    ]
    head = ("with RoPE, forward + backward", f"{NORMED}, ms", f"{ROTATED}, ms", "ratio", "limit")
    title = "{:,} tokens, head_dim 64, float32".format
    lines += table(head, [(title(n), *compared_cells(x, NORMED, ROTATED, ROTATED_LIMIT)) for n, x in rotated.items()])
    head = ("training step of a Llama, 4 layers, 2 × 512 tokens", "ms", f"{PLAIN}, ms", "ratio", "limit")
    lines += table(head, [(name, *compared_cells(step, name, PLAIN, STEP_LIMIT)) for name in STEPS if name != PLAIN])
    lines += beside_table(beside_times(min(args.turns, BESIDE_TURNS)))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the Markdown there as well")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    page = report(args, sys.argv[1:])
    publish(page, args.output)


if __name__ == "__main__":
    main()
