"""Benchmark the host's time of a call of the Triton attention with norms, RoPE and a cap, without a GPU.

    python recipes/benchmarks/bench_host.py --out host.md

Kernels are compiled for an H100, and their launches do nothing. Causal, 64 tokens, 2 query heads and 1 key head, bf16.
Times are ms of CPU for 100 calls: medians (fastest to slowest). To compare machines, calls take turns with a loop of a
million additions in Python: ratios are to its time, medians within the turns (quartiles).
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from timeit import timeit

import torch
from bench_attention import OURS, Case, Passes, draw
from compiled import Target
from page import provenance, publish, table
from timing import by_turns, cell, ratio_cell
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from hf_qknorm.ops import fused_checks

LOOP = "a million additions"


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the Markdown there as well")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    driver.set_active(Target(90))
    fused_checks._why_not_here = lambda device: None
    CompiledKernel._init_handles = lambda kernel: setattr(kernel, "_run", lambda *launch: None)
    runs = {LOOP: partial(timeit, "total += 1", "total = 0", number=1_000_000)}
    for d in (64, 128):
        x = Passes(OURS, [draw(Case(2, 1, d, 64), torch.device("cpu"), torch.bfloat16)])
        ways = {"inference": x.forward, "forward": lambda n, x=x: x.attend(x.sets[n]), "forward and backward": x.both}
        runs |= {f"{name}, head_dim {d}": partial(timeit, partial(run, 0), number=100) for name, run in ways.items()}
    times = by_turns(runs, args.turns, time.process_time)
    rows = [[name, cell(own), ratio_cell(own, times[LOOP])] for name, own in times.items()]
    return publish("The host's time", __doc__, provenance(), table(["", "ms of CPU", f"÷ {LOOP}"], rows), args.out)


if __name__ == "__main__":
    main()
