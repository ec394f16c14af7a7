"""Benchmark attention on the CPU: in C++ and tiled, with a cap, against torch's SDPA without one and eager attention.

    python recipes/benchmarks/bench_cpu.py --output recipes/results/cpu.md

In each row the implementations take turns in one process. A ratio is the median of the ratios within the turns, with
its quartiles, so that a slow moment of the machine is in both. The limits were set before the first run. Memory is the
rise of the resident size of a fresh process over forward and backward. With ATEN_CPU_CAPABILITY=avx2 it measures AVX2;
SDPA's matrix products, in MKL and oneDNN, keep AVX-512. Threads that wait for each other suffer from other programs:
run it on a quiet machine. The page says how busy others were; some rows have a neighbour that keeps one core busy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from cpu_timings import (
    CAP,
    CPP,
    EAGER,
    EAGER_LIMIT,
    HEADS,
    LIMITS,
    NORMED,
    NORMS,
    ONE_QUERY,
    ONE_QUERY_LIMIT,
    PATCHED,
    PLAIN,
    ROTATED,
    ROTATED_LENGTHS,
    ROTATED_LIMIT,
    SDPA,
    STEP_LIMIT,
    TILED,
    OneQuery,
    Row,
    attention_times,
    forward_backward,
    implementations,
    one_query_times,
    rotated_times,
    step_times,
)
from machine import Times, busy_seconds, extra_mib, made
from markdown_table import publish, table
from random_qkv import make_qkv
from run_log import provenance

MEMORY_LENGTH, MEMORY_LIMIT = 4096, 1.10


def measure_memory(name: str) -> None:
    """Print the rise of the resident size over forward and backward in MiB; needs a process of its own."""
    forward_backward(implementations(64)[name], make_qkv(1, HEADS, HEADS, 64, 64, 64))  # libraries are set up
    inputs = make_qkv(1, HEADS, HEADS, MEMORY_LENGTH, MEMORY_LENGTH, 64)
    attend = implementations(MEMORY_LENGTH)[name]
    print(extra_mib(lambda: forward_backward(attend, inputs)))


def memory(name: str) -> float:
    """The rise in MiB, from a fresh process."""
    command = [sys.executable, __file__, "--memory-of", name, "--threads", str(torch.get_num_threads())]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def quartiles(times: list[float], others: list[float]) -> tuple[float, float, float]:
    """The quartiles of the first over the second within the turns."""
    ratios = [mine / other for mine, other in zip(times, others, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, median, high


def cell(times: list[float], factor: float = 1) -> str:
    """The median and the extremes, in milliseconds times the factor."""
    return "{:.1f} ({:.1f} to {:.1f})".format(*(factor * f(times) for f in (statistics.median, min, max)))


def ratio_cell(times: list[float], others: list[float]) -> str:
    low, median, high = quartiles(times, others)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def verdict(value: float, limit: float, *, at_least: bool = False) -> str:
    met = value >= limit if at_least else value <= limit
    return f"{'≥' if at_least else '≤'} {limit:.2f}: {'met' if met else 'missed'}"


def compared_cells(times: Times, first: str, second: str, limit: float, factor: float = 1) -> tuple[str, ...]:
    """Both times, their ratio, and whether it is within the limit."""
    ours, theirs = times[first], times[second]
    return (
        cell(ours, factor),
        cell(theirs, factor),
        ratio_cell(ours, theirs),
        verdict(quartiles(ours, theirs)[1], limit),
    )


def ratio_table(title: str, measured: dict[Row, Times]) -> list[str]:
    head = (title, f"{CPP}, ms", f"{SDPA}, ms", "C++ ÷ SDPA", "limit")
    return table(head, [(str(x), *compared_cells(times, CPP, SDPA, x.limit)) for x, times in measured.items()])


def one_query_table(measured: dict[OneQuery, Times]) -> list[str]:
    head = ("one query, forward", f"{CPP}, µs", f"{SDPA}, µs", "C++ ÷ SDPA", "limit")
    rows = [(str(x), *compared_cells(times, CPP, SDPA, ONE_QUERY_LIMIT, 1e3)) for x, times in measured.items()]
    return table(head, rows)


def attention_tables(measured: dict[Row, Times]) -> list[str]:
    lines = ratio_table("forward + backward", measured)
    rows = []
    for row, times in measured.items():
        for name in set(times) & {EAGER, TILED}:
            eager = verdict(quartiles(times[name], times[CPP])[1], EAGER_LIMIT, at_least=True)
            ratios = (ratio_cell(times[name], times[other]) for other in (SDPA, CPP))
            rows.append((f"{name}: {row}", cell(times[name]), *ratios, eager if name == EAGER else ""))
    return [*lines, *table(("forward + backward", "ms", "÷ SDPA", "÷ C++", "limit"), sorted(rows))]


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
    mib = {name: memory(name) for name in (CPP, SDPA, TILED, EAGER)}
    lines = [
        "# Attention on the CPU in C++",
        "",
        f"`python recipes/benchmarks/bench_cpu.py {' '.join(arguments)}`".rstrip(),
        "",
        f"{torch.backends.cpu.get_cpu_capability()}, {args.threads} threads of {os.cpu_count()}; other programs used "
        f"{others:.2f} CPUs during the timings without a busy core; {provenance([{'made': made()}])}",
        "",
        f"Causal, batch 1, {HEADS} heads; a cap of {CAP:g} in all but SDPA, which has none. {args.turns} turns (5 for "
        "4,096 tokens). Times are medians (fastest to slowest), ratios medians within the turns (quartiles). All are "
        'within the error budget of the oracle. "A busy core": beside a process that computes without end.',
        "",
        *attention_tables(quiet | busy),
    ]
    lines += one_query_table(one_query)
    head = ("with RoPE, forward + backward", f"{NORMED}, ms", f"{ROTATED}, ms", "ratio", "limit")
    title = "{:,} tokens, head_dim 64, float32".format
    lines += table(head, [(title(n), *compared_cells(x, NORMED, ROTATED, ROTATED_LIMIT)) for n, x in rotated.items()])
    head = ("training step of a Llama, 4 layers, 2 × 512 tokens", "patched, ms", "unpatched, ms", "ratio", "limit")
    lines += table(head, [(name, *compared_cells(step, name, PLAIN, STEP_LIMIT)) for name in (PATCHED, NORMS)])
    head = (f"extra memory, forward + backward, {title(MEMORY_LENGTH)}", "MiB", "÷ SDPA", "limit")
    rises = {name: mib[name] / mib[SDPA] for name in mib}
    limits = {CPP: verdict(rises[CPP], MEMORY_LIMIT)}
    lines += table(head, [(name, f"{mib[name]:.0f}", f"{x:.2f}", limits.get(name, "")) for name, x in rises.items()])
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the Markdown there as well")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        return measure_memory(args.memory_of)
    page = report(args, sys.argv[1:])
    publish(page, args.output)


if __name__ == "__main__":
    main()
