"""Run everything that needs a Hopper GPU in one command and nine minutes: checks, benchmarks, tests.

    python recipes/benchmarks/device.py --out results
    python recipes/benchmarks/device.py --out results --only benchmark

The stages, in order: the five smallest checks; the attention benchmark, part by part; the tests (the oracle's budget,
the same bits on each run), a model's training step, tests of graphs, streams, inductor and training; tests of 128k keys
and more than 2³¹ numbers, the Gluon kernel under compute-sanitizer, `hf-qknorm doctor`.

Each stage is a process with a share of the time. What a stage leaves of it goes to the next one; a stage that is late
is stopped, keeps the rows that it wrote, and the next one runs. A stage that fails is reported and the next ones run.
Writes `device.log`, `device.csv`, `device.md` and the benchmark's
files; the exit code is 0 if nothing failed.

`--dry-run` tries all command lines out without a GPU, and runs as little as possible. Its results mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import sys
import time
from pathlib import Path

import torch
from bench_table import environment
from device_stages import Outcome, cells, full_plan, run_stages

from hf_qknorm.files.atomic_io import replace_text


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])


def write(out: Path, found: list[Outcome], machine: dict[str, str], command: str) -> str:
    """Write the CSV and the page; return the page."""
    with (out / "device.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["stage", "outcome", "seconds", "limit", "detail", *machine])
        writer.writerows(
            [x.stage, x.outcome, f"{x.seconds:.1f}", f"{x.limit:.0f}", x.detail, *machine.values()] for x in found
        )
    where = f"{machine['card']}: " + ", ".join(f"{x} {y}" for x, y in machine.items() if x != "card")
    parts = ["# On a GPU", f"`{command}`", where + "."]
    parts.append(table(["stage", "outcome", "s", "limit", "it said last"], [cells(x) for x in found]))
    page = "\n\n".join(parts) + "\n"
    replace_text(out / "device.md", page)
    return page


def main(arguments: list[str]) -> int:
    """Run the stages; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for log, CSV, pages and plots")
    parser.add_argument("--minutes", type=float, default=9, help="for all of it (default: 9)")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="these stages, by name: they share all of the time")
    parser.add_argument("--commit", help="what is measured, where git can't tell")
    parser.add_argument("--dry-run", action="store_true", help="try the command lines out without a GPU")
    args = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * args.minutes
    if not args.dry_run and not torch.cuda.is_available():
        print("needs a Hopper GPU; --dry-run tries the script out without one", file=sys.stderr)
        return 2
    out = args.out.resolve()
    commit = ("--commit", args.commit) if args.commit else ()
    stages = full_plan(out, commit)
    unknown = set(args.only or ()) - {stage.name for stage in stages}
    if unknown:
        parser.error(f"no stage is named {', '.join(sorted(unknown))}; there are {', '.join(x.name for x in stages)}")
    stages = [stage for stage in stages if not args.only or stage.name in args.only]
    out.mkdir(parents=True, exist_ok=True)
    log = out / "device.log"
    log.write_text("", encoding="utf-8")
    device = torch.device("cpu" if args.dry_run else "cuda")
    machine = environment(device, torch.float32 if args.dry_run else torch.bfloat16, args.commit)
    found = run_stages([stage.dried() for stage in stages] if args.dry_run else stages, log, deadline)
    print("\n" + write(out, found, machine, shlex.join(["python", "recipes/benchmarks/device.py", *arguments])))
    return int(any(x.outcome in ("failed", "too long") or x.detail == "no time left" for x in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
