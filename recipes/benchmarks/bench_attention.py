"""Benchmark attention with norms, RoPE and a cap against plain SDPA and other implementations: time, memory, errors.

    python recipes/benchmarks/bench_attention.py --minutes 8
    python recipes/benchmarks/bench_attention.py --list

Each implementation is checked against the fp64 oracle before it is timed. A failure of ours ends the benchmark with
exit code 1; with `--keep-going` the failed implementation is left out. An implementation that cannot run, or has no
result of its check, gets a row with the reason: `--list` prints what would be timed, and the reasons.

All times come from one run, in turns, on random data that no cache holds: device time per pass, and host time to queue
it. Ratios are to plain flash-attention SDPA in the same turns (for a prologue: to a copy of its data). TFLOP/s count
useful work: half the square for a causal forward pass, 2.5 times that for backward. GB/s count the least traffic.
Memory is the peak above the inputs; for a backward pass it includes the forward pass. Rows are appended to `--out` as
they come, and the page grows with each item.

`--first` makes the five smallest checks, and times nothing.

`--cpu` runs everything in a minute on tiny inputs in Triton's interpreter. Its numbers mean nothing and go to a
temporary folder.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from bench_cases import Case, Inputs, draw
from bench_checks import Checks, print_verdicts
from bench_implementations import Implementation
from bench_plan import Item, Part, check_jobs, first_plan, full_plan, listing, tiny_plan
from bench_table import INTERPRETED, Report, Row, environment
from bench_timing import Clock, Dead, Run, reason

from hf_qknorm.files.atomic_io import replace_text

RESULTS = Path(__file__).parents[1] / "results"
SAMPLED = 0.15  # seconds of samples for each run
FIRST_SECONDS = 50  # for each of the first checks


class Work:
    """An implementation's passes over its inputs; pass n uses the n-th set."""

    def __init__(self, implementation: Implementation, case: Case, copies: list[Inputs]) -> None:
        self.implementation, self.case = implementation, case
        self.inputs = implementation.prepared(case, copies)
        self.leaves = implementation.leaves(case, copies[0].q.device.type)
        self.outputs: dict[int, object] = {}

    def attend(self, n: int) -> object:
        return self.implementation.attend(self.case, self.inputs[n % len(self.inputs)])

    def differentiate(self, n: int, out: object, again: bool) -> None:
        x = self.inputs[n % len(self.inputs)]
        grad = (x.grad, x.v.detach()) if isinstance(out, tuple) else x.grad
        torch.autograd.grad(out, [getattr(x, name) for name in self.leaves], grad, retain_graph=again)

    def forward(self, n: int) -> None:
        with torch.no_grad():
            self.attend(n)

    def both(self, n: int) -> None:
        self.differentiate(n, self.attend(n), False)

    def backward(self, n: int) -> None:
        """Over the graph of a forward pass that is kept."""
        n %= len(self.inputs)
        if n not in self.outputs:
            self.outputs[n] = self.attend(n)
        self.differentiate(n, self.outputs[n], True)

    def run(self, kind: str) -> Run:
        return Run(getattr(self, kind), whole=self.both if kind == "backward" else None)


class Bench:
    """Run the items of a plan in order until time is up."""

    def __init__(self, report: Report, clock: Clock, dtype: torch.dtype, checks: Checks, deadline: float) -> None:
        self.report, self.clock, self.dtype, self.checks, self.deadline = report, clock, dtype, checks, deadline
        self.failures: list[str] = []
        self.skipped: list[str] = []

    @property
    def notes(self) -> list[str]:
        notes = [f"no time for {x}" for x in self.skipped] + [f"failed: {x}" for x in self.failures]
        return notes if self.clock.cuda else [*notes, INTERPRETED]

    def run(self, number: int, part: Part, keep_going: bool) -> bool:
        """Check and time a part of the plan; returns whether the next one may follow."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            self.skipped += map(str, part)
            return True
        failed = self.checks.run(number, check_jobs(part, self.checks.length), max(left / 2, 30))
        self.failures += failed
        if failed and not keep_going:
            print("\n".join(failed), file=sys.stderr)
            return False
        for item in part:
            self.take(item)
            self.write_page()
        return True

    def write_page(self) -> None:
        replace_text(self.report.stem.with_suffix(".md"), self.report.page(self.notes))

    def take(self, item: Item) -> None:
        """Measure an item; an error is reported and does not stop the others."""
        left = self.deadline - time.monotonic()
        if left < item.seconds / 2:
            self.skipped.append(str(item))
            return
        try:
            for row in self.attend(item):
                self.report.add(row)
        except Dead:
            raise
        except Exception as error:
            self.failures.append(f"{item}: {reason(error)}")
            print(self.failures[-1], file=sys.stderr, flush=True)
        self.clock.clear()

    def attend(self, item: Item) -> Iterator[Row]:
        case = item.case
        copies = draw(case, self.clock.copies(case.size(self.dtype.itemsize)), self.clock.device, self.dtype)
        works: dict[str, Work] = {}
        for implementation in item.implementations:
            note = self.checks.objection(case, implementation, self.clock.device.type)
            if note:
                yield Row(str(case), implementation.name, "all", case, note=note)
            else:
                works[implementation.name] = Work(implementation, case, copies)
        for kind in item.passes:
            runs = {}
            for name, work in works.items():
                why = work.implementation.forward_only(self.clock.device.type)
                if kind == "forward" or not why:
                    runs[name] = work.run(kind)
                elif work.implementation is not item.implementations[0]:
                    yield Row(str(case), name, kind, case, note=why)
            self.clock.race(runs, SAMPLED)
            yield from self.rows(item, kind, runs)
            for work in works.values():
                work.outputs.clear()

    def rows(self, item: Item, kind: str, runs: dict[str, Run]) -> Iterator[Row]:
        """Yield the rows of a race; keep the failures of our own."""
        first = item.implementations[0].name
        base = runs.get(first)
        for name, run in runs.items():
            if name == first and not item.shown:
                continue
            row = Row(str(item.case), name, kind, item.case, note=run.failure or "")
            if name.startswith("ours") and run.failure:
                self.failures.append(f"{item.case} | {name} | {kind}: {run.failure}")
            if run.failure is None:
                self.fill(row, item.case, run)
                row.ratio = run.median / base.median if base is not None and base.failure is None else None
            yield row

    def fill(self, row: Row, case: Case, run: Run) -> None:
        row.ms_min, row.ms_median, row.ms_max = min(run.times), run.median, max(run.times)
        row.host_ms, row.peak_mib = sorted(run.host)[len(run.host) // 2], run.peak_mib
        work, row.unit = case.work(row.kind, self.dtype.itemsize)
        row.rate = work / row.ms_median
        judged = self.checks.verdicts.get((str(case.at(self.checks.length)), row.what))
        if judged is not None:
            row.error = judged.error(row.kind)
            if not judged.passed:
                row.note = "over the error budget" if judged.errors else judged.failure


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=8, help="stop starting items after that (default: 8)")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--first", action="store_true", help="the five smallest checks alone")
    chosen.add_argument("--cpu", action="store_true", help="tiny, in Triton's interpreter: tries the script out")
    parser.add_argument("--list", action="store_true", help="print what would be timed, and end")
    parser.add_argument("--keep-going", action="store_true", help="time what passed its checks, whatever failed")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for CSV and page (default: results, here)")
    parser.add_argument("--commit", help="what is measured, where git can't tell")
    parser.add_argument("--processes", type=int, help="number of checking processes (default: 3 of 4 CPUs)")
    parser.add_argument("--checks-of", type=int, nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def chosen_plan(args: argparse.Namespace) -> tuple[list[Part], int]:
    """Return the parts, and the length at which they are checked."""
    if args.cpu:
        return tiny_plan(), 48
    if args.first:
        return [first_plan()], 192
    return full_plan(), 512


def main(arguments: list[str]) -> int:
    """Run the checks and the items of each part, and the report; return the exit code."""
    args = parse(arguments)
    start = time.monotonic()
    if args.cpu and os.environ.get("TRITON_INTERPRET") != "1":  # read when Triton is imported, as it is by now
        command = [sys.executable, __file__, *arguments]
        os.execve(sys.executable, command, os.environ | {"TRITON_INTERPRET": "1"})
    parts, length = chosen_plan(args)
    if args.list:
        print("\n".join(listing(parts, "cuda" if torch.cuda.is_available() else "cpu")))
        return 0
    if not args.cpu and not torch.cuda.is_available():
        print("needs a CUDA GPU; --cpu tries the script out without one", file=sys.stderr)
        return 2
    device, dtype = (torch.device("cpu"), torch.float32) if args.cpu else (torch.device("cuda"), torch.bfloat16)
    if args.checks_of is not None:
        part, *numbers = args.checks_of
        jobs = check_jobs(parts[part], length)
        print_verdicts([jobs[n] for n in numbers], device, dtype)
        return 0
    processes = args.processes or (1 if args.cpu else max((os.cpu_count() or 1) * 3 // 4, 1))
    checks = Checks(length, arguments, processes)
    if args.first:
        return int(bool(checks.run(0, check_jobs(parts[0], length), FIRST_SECONDS)))

    folder = args.out or (Path(tempfile.mkdtemp()) if args.cpu else RESULTS)
    report = Report(folder, environment(device, dtype, args.commit), arguments)
    bench = Bench(report, Clock(device), dtype, checks, start + 60 * args.minutes)
    try:
        for number, items in enumerate(parts):
            if not bench.run(number, items, args.keep_going):
                break
    except Dead as error:
        bench.failures.append(f"the device died: {error}")
    bench.write_page()
    print("\n".join(["", *bench.notes, f"kept in {report.stem}.*"]), flush=True)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
