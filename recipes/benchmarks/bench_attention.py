"""Benchmark attention with norms, RoPE and a cap on a GPU beside torch's SDPA without them: time, memory, errors.

    python recipes/benchmarks/bench_attention.py --minutes 8
    python recipes/benchmarks/bench_attention.py --cpu

Each implementation is first checked against the oracle in fp64 on a short text; ours must pass. Then all take turns on
random data that no cache holds. Ratios are to SDPA with FlashAttention in the same turns, and for norm and RoPE alone
to a copy of their data. TFLOP/s count useful work: half the square for a causal forward pass, and 2.5 times that for
backward. GB/s count the least traffic. Memory is the peak above the inputs; for a backward pass it has the forward
pass. An implementation that can't run has a row with the reason. Rows are appended to a CSV as they come, and the page
grows with each case. `--cpu` runs tiny cases in Triton's interpreter; their numbers mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_cases import CASES, TINY, Case, Implementation, Inputs, draw, oracle, results
from page import made, publish, table
from timing import Clock, Run, reason

from hf_qknorm.ops.error_budget import Verdict, verdict

CHECKED, TURNS, PASSES = 512, 15, ("forward", "backward", "both")
HEAD = ("case", "what", "pass", "ms", "min", "max", "host ms", "rate", "ratio", "MiB", "error", "note")


def check(implementation: Implementation, case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Verdict]:
    """The errors of the output and the gradients on a short text, and their budgets."""
    short = case.short(CHECKED if device.type == "cuda" else 48)
    x, names = draw(short, device, dtype), implementation.leaves(short)
    exact = Inputs(*(y.double() for y in x))
    expected = partial(oracle, short, normed=implementation.normed, softcap=implementation.softcap)
    got, true, eager = (
        results(f, y, names) for f, y in ((partial(implementation.attend, short), x), (expected, exact), (expected, x))
    )
    return {name: verdict(y, true[name], eager[name]) for name, y in got.items()}


class Passes:
    """An implementation's passes over sets of inputs; pass n uses the n-th."""

    def __init__(self, implementation: Implementation, case: Case, sets: list[Inputs]) -> None:
        self.attend, self.names = partial(implementation.attend, case), implementation.leaves(case)
        self.sets = [x.leaves(self.names) for x in sets]
        self.outputs: dict[int, Any] = {}

    def forward(self, n: int) -> None:
        with torch.no_grad():
            self.attend(self.sets[n % len(self.sets)])

    def both(self, n: int) -> None:
        x = self.sets[n % len(self.sets)]
        self._differentiate(x, self.attend(x), again=False)

    def backward(self, n: int) -> None:
        """Over the graph of a forward pass that is kept."""
        n %= len(self.sets)
        if n not in self.outputs:
            self.outputs[n] = self.attend(self.sets[n])
        self._differentiate(self.sets[n], self.outputs[n], again=True)

    def _differentiate(self, x: Inputs, out: Any, again: bool) -> None:
        grad = (x.grad, x.v.detach()) if isinstance(out, tuple) else x.grad
        torch.autograd.grad(out, [getattr(x, name) for name in self.names], grad, retain_graph=again)


def measure(case: Case, compared: tuple[Implementation, ...], clock: Clock, dtype: torch.dtype) -> Iterator[list[str]]:
    """The rows of a case. Raises AssertionError if an implementation of ours is not within its budget."""
    errors: dict[str, dict[str, Verdict]] = {}
    for implementation in compared:
        try:
            errors[implementation.name] = check(implementation, case, clock.device, dtype)
        except Exception as error:  # of another library: a row with the reason
            if implementation.ours:
                raise AssertionError(f"{case}, {implementation.name}: {reason(error)}") from error
            yield [str(case), implementation.name, *[""] * 9, reason(error)]
            continue
        over = {name: x for name, x in errors[implementation.name].items() if not x.passed}
        assert not (over and implementation.ours), f"{case}, {implementation.name}: over the error budget: {over}"
    runnable = [x for x in compared if x.name in errors]
    sets = [draw(case, clock.device, dtype, seed) for seed in range(clock.copies(case.size(dtype.itemsize)))]
    for kind in PASSES[:1] if case.keys else PASSES:
        passes = {x.name: Passes(x, case, sets) for x in runnable if kind == "forward" or x.leaves(case)}
        runs = {name: Run(getattr(x, kind), whole=x.both if kind == "backward" else None) for name, x in passes.items()}
        clock.race(runs, TURNS if clock.cuda else 2)
        for name, run in runs.items():
            yield cells(case, name, kind, run, runs.get(compared[0].name), errors[name], dtype)


def cells(
    case: Case, name: str, kind: str, run: Run, base: Run | None, errors: dict[str, Verdict], dtype: torch.dtype
) -> list[str]:
    if run.failure:
        return [str(case), name, kind, *[""] * 8, run.failure]
    work, unit = case.work(kind, dtype.itemsize)
    rate, host = work / run.median, sorted(run.host)[len(run.host) // 2]
    ratio = "" if base is None or base.failure else f"{run.median / base.median:.2f}"
    times = [f"{x:.4f}" for x in (run.median, min(run.times), max(run.times), host)]
    worst = max(x.error for n, x in errors.items() if kind == "both" or (n == "out") == (kind == "forward"))
    peak = "" if run.peak_mib is None else f"{run.peak_mib:.0f}"
    return [str(case), name, kind, *times, f"{rate:.3g} {unit}", ratio, peak, f"{worst:.1e}", ""]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=8, help="no case starts after that (default: 8)")
    parser.add_argument("--cpu", action="store_true", help="tiny cases, in Triton's interpreter")
    parser.add_argument("--out", type=Path, default=Path("attention"), help="CSV and page, without the ending")
    args = parser.parse_args(arguments)
    if args.cpu and os.environ.get("TRITON_INTERPRET") != "1":  # read when Triton is imported, as it is by now
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"TRITON_INTERPRET": "1"})
    if not args.cpu and not torch.cuda.is_available():
        print("bench_attention.py needs a CUDA GPU; --cpu tries it out without one", file=sys.stderr)
        return 2
    device, dtype = (torch.device("cpu"), torch.float32) if args.cpu else (torch.device("cuda"), torch.bfloat16)
    end, rows, notes = time.monotonic() + 60 * args.minutes, [], []
    where = ", ".join(f"{name} {value}" for name, value in made().items()) + f", {dtype}"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*HEAD, "made"])
        for case, compared in TINY if args.cpu else CASES:
            if time.monotonic() > end:
                notes.append(f"- no time for {case}")
                continue
            try:
                for row in measure(case, compared, Clock(device), dtype):
                    rows.append(row)
                    writer.writerow([*row, where])
                    file.flush()
            except AssertionError as error:
                notes.append(f"- failed: {error}")
    publish(["# Attention", "", where + ".", "", *notes, "", *table(HEAD, rows, "lll" + "r" * 8 + "l")], args.out)
    return int(any("failed" in note for note in notes))


if __name__ == "__main__":
    sys.exit(main())
