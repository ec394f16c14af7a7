"""Benchmark the C++ attention against the peak of the cores: products and sums a second, forward and backward.

    python recipes/benchmarks/bench_peak.py --output recipes/results/cpu_peak.md

The peak is that of a loop of independent fused multiply-adds in registers, compiled for this CPU, with as many threads,
in the same turns. A matrix product of torch in fp32 shows what a tuned library reaches. Causal attention counts the
products below the diagonal alone: two matrix products forward, five backward (the logits again, and the gradients of
the weights, q, k and v). Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import test_helpers_path  # noqa: F401
import torch
from machine import Times, beside_others, by_turns, made
from markdown_table import publish, table
from run_log import provenance

from hf_qknorm.ops.cpu import attention
from hf_qknorm.ops.types import Call, Heads, Options, Visible
from qknorm_tests.random_qkv import make_qkv

HEADS, CAP = 8, 50.0
ROUNDS = 1 << 23  # some 20 ms, beside which it takes no time to wake the threads
CHAINS = 12  # a fused multiply-add takes four cycles, and two start in each
SOURCE = f"""
#ifdef __AVX512F__
typedef float Vec __attribute__((vector_size(64)));
#else
typedef float Vec __attribute__((vector_size(32)));
#endif
extern "C" long numbers() {{ return sizeof(Vec) / sizeof(float); }}
static float fma_rounds(long rounds) {{
  Vec sums[{CHAINS}], factor = Vec{{}} + 0.999f, term = Vec{{}} + 1e-3f;
  for (int c = 0; c < {CHAINS}; ++c) sums[c] = Vec{{}} + float(c);  // a compiler merges equal chains
  for (long i = 0; i < rounds; ++i)
#pragma GCC unroll {CHAINS}
    for (int c = 0; c < {CHAINS}; ++c) sums[c] = sums[c] * factor + term;
  float total = 0;
  for (int c = 0; c < {CHAINS}; ++c) total += sums[c][0];
  return total;
}}
extern "C" float fma_threads(long rounds, int threads) {{
  float total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total)
  for (int i = 0; i < threads; ++i) total += fma_rounds(rounds);
  return total;
}}
"""


def peak_loop() -> tuple[Callable[[], object], float]:
    """A call of the loop in each of torch's threads, of the same OpenMP, and its number of products and sums."""
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/peak.so"
        options = ["-O2", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC", "-x", "c++", "-", "-o"]
        command = ["c++", *options, library]
        subprocess.run(command, input=SOURCE, text=True, check=True)
        loop = ctypes.CDLL(library)
    loop.fma_threads.argtypes, loop.fma_threads.restype = [ctypes.c_long, ctypes.c_int], ctypes.c_float
    threads = torch.get_num_threads()
    return lambda: loop.fma_threads(ROUNDS, threads), 2.0 * CHAINS * loop.numbers() * ROUNDS * threads


def passes(length: int, head_dim: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Forward as in training, and backward, with their numbers of products and sums."""
    tensors = make_qkv(1, HEADS, HEADS, length, length, head_dim)

    def forward() -> Any:
        return attention.attention(Call(Heads(*tensors), Visible(), Options(head_dim**-0.5, CAP, causal=True)))

    out = forward()
    grad = torch.randn_like(out)
    matrix = length * (length + 1) * head_dim * HEADS  # one product of matrices, below the diagonal
    return {
        "forward": (forward, 2.0 * matrix),
        "backward": (lambda: torch.autograd.grad(out, tensors, grad, retain_graph=True), 5.0 * matrix),
    }


def rates(times: Times, counts: dict[str, float]) -> dict[str, list[float]]:
    """Billions of products and sums a second, turn by turn."""
    return {name: [counts[name] / x / 1e6 for x in times[name]] for name in times}


def measure(threads: int, turns: int, lengths: list[int]) -> list[tuple[str, ...]]:
    """The rows of the page for a number of threads."""
    torch.set_num_threads(threads)
    square = torch.randn(1024, 1024)
    loop, count = peak_loop()
    jobs = {"peak": (loop, count), "matrix product": (lambda: square @ square, 2.0 * 1024**3)}
    for length, head_dim in product(lengths, (64, 128)):
        named = passes(length, head_dim)
        jobs |= {f"{name}, {length:,} tokens, head_dim {head_dim}": job for name, job in named.items()}
    times = by_turns({name: run for name, (run, _) in jobs.items()}, turns)
    found = rates(times, {name: number for name, (_, number) in jobs.items()})
    rows = []
    for name, values in found.items():
        shares = [x / peak for x, peak in zip(values, found["peak"], strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4, method="inclusive")
        rows.append((name, str(threads), f"{statistics.median(values):.0f}", f"{middle:.2f} ({low:.2f} to {high:.2f})"))
    return rows


def report(args: argparse.Namespace, arguments: list[str]) -> str:
    """Measure everything; return a Markdown page."""
    rows, busy = beside_others(
        lambda: [row for threads in args.threads for row in measure(threads, args.turns, args.lengths)]
    )
    head = ("", "threads", "GFLOP/s", "of the peak (quartiles)")
    lines = [
        "# Attention in C++ and the peak of the cores",
        "",
        f"`python recipes/benchmarks/bench_peak.py {' '.join(arguments)}`".rstrip(),
        "",
        f"{busy}; {provenance([{'made': made()}])}",
        "",
        f"Causal, batch 1, {HEADS} heads, fp32, a cap of {CAP:g}; {args.turns} turns.",
        "",
        *table(head, rows),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[n for n in (1, 2, 4, 8) if n <= (os.cpu_count() or 1)]
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the Markdown there as well")
    args = parser.parse_args()
    publish(report(args, sys.argv[1:]), args.output)


if __name__ == "__main__":
    main()
