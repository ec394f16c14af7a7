"""Benchmark the C++ attention on the CPU: a cap against torch's SDPA without one, eager attention, tiled, and a model.

    python recipes/benchmarks/bench_cpu.py --output recipes/results/cpu.md

In each row the implementations take turns in one process. A ratio is the median of the ratios within the turns, with
its quartiles, so that a slow moment of the machine is in both. The limits were set before the first run. Memory is the
rise of the resident size of a fresh process over forward and backward, as in `bench_tiled.py`. On a CPU with AVX-512 a
process with ATEN_CPU_CAPABILITY=avx2 in its environment measures AVX2.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import test_helpers_path  # noqa: F401
import torch
import torch.nn.functional as F
from bench_tiled import busy_seconds, commit, cpu_name, forward_backward, neighbour, status_mib
from error_budget import assert_within_budget
from markdown_table import publish, table
from random_qkv import make_qkv
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import hf_qknorm as qk
from hf_qknorm.ops import library, reference
from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.types import Heads, Options, Visible

HEADS, CAP = 8, 50.0
CPP, SDPA, EAGER, TILED = "C++, cap", "SDPA, no cap", "eager, cap", "tiled, cap"
NORMED, ROTATED = "C++, norms, RoPE, cap", "SDPA, RoPE"
PATCHED, PLAIN = "patched, norms and cap", "unpatched"
MEMORY_LENGTH = 4096
Times = dict[str, list[float]]


class Row(NamedTuple):
    """What is measured, and the largest C++ ÷ SDPA that is allowed."""

    length: int
    head_dim: int
    dtype: torch.dtype
    limit: float
    names: tuple[str, ...] = (CPP, SDPA)
    busy: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.length:,} tokens, head_dim {self.head_dim}, {dtype}" + (", a busy core" if self.busy else "")


F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
LIMITS = (
    Row(512, 64, F32, 0.85),
    Row(1024, 64, F32, 0.75, (CPP, SDPA, EAGER, TILED)),
    Row(1024, 128, F32, 0.75),
    Row(4096, 64, F32, 0.90, (CPP, SDPA, EAGER, TILED)),
    Row(4096, 128, F32, 0.90),
    Row(1024, 64, BF16, 1.00),
    Row(4096, 64, BF16, 1.00),
    Row(512, 64, F32, 0.85, busy=True),
    Row(1024, 64, F32, 0.75, (CPP, SDPA, TILED), busy=True),
)
AVX2_ROWS = (Row(512, 64, F32, 0.85), Row(1024, 64, F32, 0.75), Row(1024, 64, BF16, 1.00))
ROTATED_LENGTHS = (512, 1024, 4096)
EAGER_LIMIT, MEMORY_LIMIT, STEP_LIMIT, ROTATED_LIMIT, ONE_QUERY_LIMIT = 6.5, 1.10, 1.00, 1.00, 1.00


class OneQuery(NamedTuple):
    """A step of generation: a query of each head, over the keys of a cache."""

    heads_kv: int
    keys: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{HEADS} heads on {self.heads_kv} key head{'s' * (self.heads_kv > 1)}, {self.keys:,} keys, {dtype}"


ONE_QUERY = tuple(OneQuery(*sizes, F32) for sizes in itertools.product((8, 2, 1), (256, 1024, 8192)))
ONE_QUERY += tuple(OneQuery(8, keys, BF16) for keys in (256, 8192))
CALLS = 1 << 14  # of a turn, for one key


def implementations(length: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """All causal; the plain one, with a cap, is that of Gemma 2 in transformers."""
    hidden = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
        return torch.matmul(torch.softmax(torch.tanh(logits / CAP) * CAP + hidden, dim=-1), v)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Heads, Visible, Options]:
        return Heads(q, k, v), Visible(), Options(q.shape[-1] ** -0.5, CAP, causal=True)

    return {
        CPP: lambda q, k, v: cpu.attention(*call(q, k, v)),
        SDPA: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        EAGER: eager,
        TILED: lambda q, k, v: library.attention(*call(q, k, v)),
    }


def rotated_times(length: int, turns: int) -> Times:
    """Forward and backward with RoPE and, for the C++ attention, norms with gains, as a patched Llama trains."""
    compared = implementations(length)
    rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=64))
    q, k, v = make_qkv(1, HEADS, HEADS, length, length, 64)
    positions = rotary(q, torch.arange(length)[None])
    gains = [torch.ones(64, requires_grad=True) for _ in range(2)]

    def normed(q: Tensor, k: Tensor, v: Tensor, *gains: Tensor) -> Tensor:
        heads = zip((q, k), gains, strict=True)
        q, k = (reference.head_norm(x.transpose(1, 2), "rms", gain).transpose(1, 2) for x, gain in heads)
        return compared[CPP](*apply_rotary_pos_emb(q, k, *positions), v)

    def rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compared[SDPA](*apply_rotary_pos_emb(q, k, *positions), v)

    ours, theirs = (q, k, v, *gains), (q, k, v)
    runs = {NORMED: lambda: forward_backward(normed, ours), ROTATED: lambda: forward_backward(rotated, theirs)}
    return by_turns(runs, turns)


def by_turns(runs: dict[str, Callable[[], object]], turns: int) -> Times:
    """The milliseconds of each run, after two turns to warm up."""
    times: Times = {name: [] for name in runs}
    for turn in range(-2, turns):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def attention_times(row: Row, turns: int) -> Times:
    """Forward and backward of each implementation, after a check against the oracle."""
    inputs = make_qkv(1, HEADS, HEADS, row.length, row.length, row.head_dim, dtype=row.dtype)
    compared = implementations(row.length)
    check(row, compared[CPP])
    runs = {name: lambda name=name: forward_backward(compared[name], inputs) for name in row.names}
    with neighbour() if row.busy else nullcontext():
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


@torch.no_grad()
def one_query_times(row: OneQuery, turns: int) -> Times:
    """The milliseconds of a call, from several calls a turn; all of it, with what Python does around the kernel."""
    q, k, v = make_qkv(1, HEADS, row.heads_kv, 1, row.keys, 64, dtype=row.dtype)
    call = Heads(q.detach(), k.detach(), v.detach()), Visible(), Options(64**-0.5, CAP)
    attends = {
        CPP: lambda: cpu.attention(*call),
        SDPA: lambda: F.scaled_dot_product_attention(*call[0][:3], enable_gqa=row.heads_kv < HEADS),
    }
    exact, eager = (reference.attention(*(x.to(y) for x in call[0][:3]), softcap=CAP).out for y in (F64, row.dtype))
    assert_within_budget(attends[CPP](), exact, eager)
    count = max(CALLS // row.keys, 4)
    runs = {name: lambda attend=attend: [attend() for _ in range(count)] for name, attend in attends.items()}
    return {name: [x / count for x in times] for name, times in by_turns(runs, turns).items()}


def print_avx2_times(turns: int) -> None:
    """Print the times of `AVX2_ROWS` as JSON; needs ATEN_CPU_CAPABILITY=avx2 in the environment."""
    print(json.dumps([attention_times(row, turns) for row in AVX2_ROWS]))


def avx2_times(turns: int) -> dict[Row, Times]:
    """The times of `AVX2_ROWS` with AVX2, from a fresh process."""
    command = [sys.executable, __file__, "--avx2", "--turns", str(turns), "--threads", str(torch.get_num_threads())]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return dict(zip(AVX2_ROWS, json.loads(run.stdout), strict=True))


def step_times(turns: int) -> Times:
    """A training step of a Llama of 4 layers with 8 heads of 64, on 2 texts of 512 tokens."""
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=2048, attn_implementation="sdpa")
    tokens = torch.randint(2048, (2, 512), generator=torch.Generator().manual_seed(0))
    runs: dict[str, Callable[[], object]] = {}
    for name in (PATCHED, PLAIN):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
        if name == PATCHED:
            qk.patch_model(model, "qk_norm_cap")
        runs[name] = training_step(model.train(), tokens)
    return by_turns(runs, turns)


def training_step(model: Any, tokens: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_memory(name: str) -> None:
    """Print the rise of the resident size over forward and backward in MiB; needs a process of its own."""
    forward_backward(implementations(64)[name], make_qkv(1, HEADS, HEADS, 64, 64, 64))  # libraries are set up
    inputs = make_qkv(1, HEADS, HEADS, MEMORY_LENGTH, MEMORY_LENGTH, 64)
    attend = implementations(MEMORY_LENGTH)[name]
    ctypes.CDLL(None).malloc_trim(0)  # freed memory would be used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status_mib("VmRSS")
    forward_backward(attend, inputs)
    print(status_mib("VmHWM") - before)


def memory(name: str) -> float:
    """The rise in MiB, from a fresh process."""
    command = [sys.executable, __file__, "--memory-of", name, "--threads", str(torch.get_num_threads())]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def quartiles(times: list[float], others: list[float]) -> tuple[float, float, float]:
    """The quartiles of the first over the second within the turns."""
    ratios = [mine / other for mine, other in zip(times, others, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, median, high


def milliseconds(times: list[float]) -> str:
    return f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"


def microseconds(times: list[float]) -> str:
    return milliseconds([1e3 * x for x in times])


def ratio_cell(times: list[float], others: list[float]) -> str:
    low, median, high = quartiles(times, others)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def verdict(value: float, limit: float, *, at_least: bool = False) -> str:
    met = value >= limit if at_least else value <= limit
    return f"{'≥' if at_least else '≤'} {limit:.2f}: {'met' if met else 'missed'}"


def compared_cells(times: Times, first: str, second: str, limit: float) -> tuple[str, ...]:
    """Both times, their ratio, and whether it is within the limit."""
    found = verdict(quartiles(times[first], times[second])[1], limit)
    return milliseconds(times[first]), milliseconds(times[second]), ratio_cell(times[first], times[second]), found


def ratio_table(title: str, measured: dict[Row, Times]) -> list[str]:
    head = (title, f"{CPP}, ms", f"{SDPA}, ms", "C++ ÷ SDPA", "limit")
    return table(head, [(str(x), *compared_cells(times, CPP, SDPA, x.limit)) for x, times in measured.items()])


def one_query_table(measured: dict[OneQuery, Times]) -> list[str]:
    head = ("one query, forward", f"{CPP}, µs", f"{SDPA}, µs", "C++ ÷ SDPA", "limit")
    rows = []
    for row, times in measured.items():
        ours, theirs = times[CPP], times[SDPA]
        found = verdict(quartiles(ours, theirs)[1], ONE_QUERY_LIMIT)
        rows.append((str(row), microseconds(ours), microseconds(theirs), ratio_cell(ours, theirs), found))
    return table(head, rows)


def attention_tables(measured: dict[Row, Times]) -> list[str]:
    lines = ratio_table("forward + backward", measured)
    head = ("forward + backward", "ms", "÷ C++", "limit")
    rows = []
    for row, times in measured.items():
        for name in set(times) & {EAGER, TILED}:
            eager = verdict(quartiles(times[name], times[CPP])[1], EAGER_LIMIT, at_least=True)
            cells = milliseconds(times[name]), ratio_cell(times[name], times[CPP])
            rows.append((f"{name}: {row}", *cells, eager if name == EAGER else ""))
    return [*lines, *table(head, sorted(rows))]


def report(args: argparse.Namespace, arguments: list[str]) -> str:
    """Measure everything; return a Markdown page."""
    (machine, own), start = busy_seconds(), time.perf_counter()
    quiet = {row: attention_times(row, args.turns if row.length <= 1024 else 5) for row in LIMITS if not row.busy}
    rotated = {length: rotated_times(length, args.turns if length <= 1024 else 5) for length in ROTATED_LENGTHS}
    one_query = {row: one_query_times(row, args.turns) for row in ONE_QUERY}
    step = step_times(args.turns)
    machine, own = (after - before for after, before in zip(busy_seconds(), (machine, own), strict=True))
    others = max(machine - own, 0) / (time.perf_counter() - start)
    busy = {row: attention_times(row, args.turns) for row in LIMITS if row.busy}
    mib = {name: memory(name) for name in (CPP, SDPA)}
    avx2 = avx2_times(args.turns) if torch.backends.cpu.get_cpu_capability() == "AVX512" else {}
    lines = [
        "# Attention on the CPU in C++",
        "",
        f"`python recipes/benchmarks/bench_cpu.py {' '.join(arguments)}`".rstrip(),
        "",
        f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {args.threads} threads of {os.cpu_count()} (other "
        f"programs used {others:.2f} CPUs during the timings without a busy core), torch {torch.__version__}, Python "
        f"{platform.python_version()}, commit {commit('hf_qknorm')}, {datetime.date.today()}.",
        "",
        f"Causal, batch 1, {HEADS} heads; a cap of {CAP:g} in all but SDPA, which has none. {args.turns} turns (5 for "
        "4,096 tokens). Times are medians (fastest to slowest), ratios medians within the turns (quartiles). All are "
        'within the error budget of the oracle. "A busy core": beside a process that computes without end.',
        "",
        *attention_tables(quiet | busy),
    ]
    lines += one_query_table(one_query)
    if avx2:
        lines += ratio_table("forward + backward, AVX2 (SDPA's matrix products, in MKL and oneDNN, keep AVX-512)", avx2)
    head = ("with RoPE, forward + backward", f"{NORMED}, ms", f"{ROTATED}, ms", "ratio", "limit")
    title = "{:,} tokens, head_dim 64, float32".format
    lines += table(head, [(title(n), *compared_cells(x, NORMED, ROTATED, ROTATED_LIMIT)) for n, x in rotated.items()])
    head = ("training step", f"{PATCHED}, ms", f"{PLAIN}, ms", "patched ÷ unpatched", "limit")
    lines += table(head, [("Llama, 4 layers, 2 × 512 tokens", *compared_cells(step, PATCHED, PLAIN, STEP_LIMIT))])
    rise = mib[CPP] / mib[SDPA]
    cells = f"{mib[CPP]:.0f}", f"{mib[SDPA]:.0f}", f"{rise:.2f}"
    head = ("extra memory, forward + backward", f"{CPP}, MiB", f"{SDPA}, MiB", "C++ ÷ SDPA", "limit")
    lines += table(head, [(title(MEMORY_LENGTH), *cells, verdict(rise, MEMORY_LIMIT))])
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the Markdown there as well")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--avx2", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        return measure_memory(args.memory_of)
    if args.avx2:
        return print_avx2_times(args.turns)
    page = report(args, sys.argv[1:])
    publish(page, args.output)


if __name__ == "__main__":
    main()
