"""Run everything that needs a Hopper GPU in one command and nine minutes: tests, the Gluon kernel, benchmarks.

    python recipes/benchmarks/device.py --out results
    python recipes/benchmarks/device.py --out results --prototypes ../kernels

The stages, in order: the kernels' tests (the oracle's budget, the same bits on each run); the tests of graphs, streams,
inductor, training, 128k keys and more than 2³¹ numbers; the Gluon kernel against the plain one, also under compute-
sanitizer, and its tests; the attention benchmark, and its most important rows with the Gluon kernel; then, if time and
a folder permit, `gpu_smoke.py` of the prototypes. Each stage is a process with a time limit. A stage that fails or runs
out of time is reported and the next ones run, except those that would measure a faulty kernel. Writes `device.log`,
`device.csv`, `device.md` and the benchmark's files; the exit code is 0 if nothing failed.

`--dry-run` tries the script out without a GPU, each stage in its smallest form. Its results mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from bench_table import environment

from hf_qknorm.files.atomic_io import replace_text

HERE = Path(__file__).parent
TESTS = (
    "tests/ops/triton",
    "tests/model/test_kernels_in_models.py",
    "tests/model/test_kernels_with_caches.py",
    "tests/recipes/benchmarks/test_bench_model.py",
)
ON_CARD = ("tests/test_on_card.py", "tests/ops/test_large.py")  # the second takes up to 45 GB a test
GLUON = {"HF_QKNORM_GLUON": "1"}
CHECKED = "Gluon, checked"
PROCESSES = max((os.cpu_count() or 1) * 3 // 4, 1)  # of tests: they leave some CPUs to the compiler
LEAST = 10.0  # seconds in which no stage is worth starting


@dataclass(frozen=True)
class Stage:
    """A process in the repository's root. `missing` is the reason why it cannot run, `after` a stage that must pass
    first.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    settings: dict[str, str] = field(default_factory=dict)
    missing: str = ""
    after: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Kernels run natively unless the stage says otherwise; the Gluon kernel is off unless the stage asks for
        it.
        """
        inherited = {x: value for x, value in os.environ.items() if x not in ("TRITON_INTERPRET", *GLUON)}
        return inherited | {"PYTHONUNBUFFERED": "1"} | self.settings


@dataclass(frozen=True)
class Outcome:
    """The end of a stage: "passed", "failed", "too long" or "skipped", with its last output or the reason."""

    stage: str
    outcome: str
    seconds: float
    limit: float
    detail: str


def python(*arguments: object) -> tuple[str, ...]:
    return (sys.executable, *map(str, arguments))


def tests(count: int, *arguments: str) -> tuple[str, ...]:
    """Run pytest on `count` processes; it prints each test, in case it is stopped."""
    processes = ("-n", str(count)) if find_spec("xdist") else ()
    return python("-m", "pytest", "-o", "addopts=", "-v", "-p", "no:cacheprovider", *processes, *arguments)


def sanitized(tool: str) -> Stage:
    """Run the Gluon check under compute-sanitizer, without PyTorch's allocator, which hides accesses out of bounds."""
    found = shutil.which("compute-sanitizer")
    command = (found or "compute-sanitizer", "--tool", tool, "--error-exitcode", "1")
    check = python(HERE / "check_gluon.py", "--small")
    missing = "" if found else "no compute-sanitizer here"
    return Stage(f"Gluon, {tool}", command + check, 40, GLUON | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, missing)


def full_plan(out: Path, commit: tuple[str, ...], prototypes: Path | None) -> list[Stage]:
    """All stages, the most important first."""
    bench = HERE / "bench_attention.py"
    smoke = prototypes / "gpu_smoke.py" if prototypes else Path("gpu_smoke.py")
    gluon = ("--quick", "--minutes", "1", "--keep-going", "--out", out / "gluon", *commit)
    return [
        Stage("tests", tests(PROCESSES, *TESTS), 120),
        Stage("tests, on the card", tests(min(PROCESSES, 6), *ON_CARD), 65),
        Stage(CHECKED, python(HERE / "check_gluon.py"), 45),
        sanitized("memcheck"),
        sanitized("racecheck"),
        Stage("Gluon, tests", tests(PROCESSES, "tests/ops/triton/test_gluon.py"), 60, GLUON, after=CHECKED),
        Stage("benchmark", python(bench, "--minutes", "1.5", "--keep-going", "--out", out, *commit), 95),
        Stage("benchmark, Gluon", python(bench, *gluon), 75, GLUON, after=CHECKED),
        Stage("prototypes", python(smoke), 90, missing="" if smoke.is_file() else "no folder of prototypes"),
    ]


def dry_plan(out: Path) -> list[Stage]:
    """Each stage in its smallest form: no kernel is compiled, and times are not taken."""
    interpreted, none = {"TRITON_INTERPRET": "1"}, "needs a GPU"
    alone = python("-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider")
    return [
        Stage("tests", (*alone, "tests/ops/triton/test_launch.py"), 60, interpreted),
        Stage("tests, on the card", (), 0, missing=none),
        Stage(CHECKED, python(HERE / "check_gluon.py", "--cpu"), 60, interpreted),
        *(Stage(f"Gluon, {tool}", (), 0, missing=none) for tool in ("memcheck", "racecheck")),
        Stage(
            "Gluon, tests", (*alone, "tests/ops/triton/test_gluon.py", "-k", "default"), 60, interpreted, after=CHECKED
        ),
        Stage("benchmark", python(HERE / "bench_attention.py", "--help"), 60, interpreted),
        Stage("benchmark, Gluon", (), 0, missing=none, after=CHECKED),
        Stage("prototypes", (), 0, missing=none),
    ]


def run_stages(stages: list[Stage], log: Path, deadline: float) -> list[Outcome]:
    """Run the stages in order until the deadline (`time.monotonic`); their output goes to the log."""
    found: list[Outcome] = []
    for stage in stages:
        left = deadline - time.monotonic()
        failed = [x.stage for x in found if x.stage == stage.after and x.outcome != "passed"]
        reason = stage.missing or (f"{stage.after!r} did not pass" if failed else "")
        if reason or left < LEAST:
            found.append(Outcome(stage.name, "skipped", 0.0, stage.seconds, reason or "no time left"))
        else:
            found.append(run_stage(stage, log, min(stage.seconds, left)))
        print(" | ".join(cells(found[-1])), flush=True)
    return found


def run_stage(stage: Stage, log: Path, limit: float) -> Outcome:
    """Run a stage in a process group, which ends with it."""
    start = time.monotonic()
    with log.open("a", encoding="utf-8") as file:
        file.write(f"\n== {stage.name}, at most {limit:.0f} s: {' '.join(stage.command)}\n")
        begin = file.tell()
        file.flush()
        process = subprocess.Popen(
            stage.command,
            cwd=HERE.parents[1],
            env=stage.environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    seconds = time.monotonic() - start
    outcome = "too long" if code is None else "failed" if code else "passed"
    return Outcome(stage.name, outcome, seconds, limit, last_line(log, begin))


def last_line(log: Path, begin: int) -> str:
    """Return the last line of the log after position `begin`."""
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(begin)
        return next((line.strip()[:120] for line in reversed(file.readlines()) if line.strip()), "")


def cells(x: Outcome) -> list[str]:
    return [x.stage, x.outcome, f"{x.seconds:.0f}", f"{x.limit:.0f}", x.detail.replace("|", "/")]


def faster(out: Path) -> list[list[str]]:
    """Return our rows of both benchmarks: times of the plain and the Gluon kernel, and their ratio."""
    plain, gluon = (times(folder) for folder in (out, out / "gluon"))
    return [
        [*row, f"{plain[row]:.4f}", f"{gluon[row]:.4f}", f"{gluon[row] / plain[row]:.2f}"]
        for row in gluon
        if row in plain
    ]


def times(folder: Path) -> dict[tuple[str, ...], float]:
    """Medians of our own rows, in ms."""
    rows = [row for path in folder.glob("attention_*.csv") for row in csv.DictReader(path.open(encoding="utf-8"))]
    return {
        (row["case"], row["what"], row["kind"]): float(row["ms_median"])
        for row in rows
        if row["what"].startswith("ours") and row["ms_median"]
    }


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])


def write(out: Path, found: list[Outcome], machine: dict[str, str], command: str) -> str:
    """Write the CSV and the page; return the page."""
    with (out / "device.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["stage", "outcome", "seconds", "limit", "detail", *machine])
        writer.writerows([x.stage, x.outcome, f"{x.seconds:.1f}", x.limit, x.detail, *machine.values()] for x in found)
    where = f"{machine['card']}: " + ", ".join(f"{x} {y}" for x, y in machine.items() if x != "card")
    parts = ["# On a GPU", f"`{command}`", where + "."]
    parts.append(table(["stage", "outcome", "s", "limit", "it said last"], [cells(x) for x in found]))
    rows = faster(out)
    if rows:
        parts.append(table(["case", "what", "pass", "plain ms", "Gluon ms", "Gluon / plain"], rows))
    page = "\n\n".join(parts) + "\n"
    replace_text(out / "device.md", page)
    return page


def main(arguments: list[str]) -> int:
    """Run all stages; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for log, CSV, pages and plots")
    parser.add_argument("--minutes", type=float, default=9, help="for all of it (default: 9)")
    parser.add_argument("--prototypes", type=Path, metavar="FOLDER", help="with a gpu_smoke.py, to be run last")
    parser.add_argument("--commit", help="what is measured, where git can't tell")
    parser.add_argument("--dry-run", action="store_true", help="try the script out without a GPU")
    args = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * args.minutes
    if not args.dry_run and not torch.cuda.is_available():
        print("needs a Hopper GPU; --dry-run tries the script out without one", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    commit = ("--commit", args.commit) if args.commit else ()
    stages = dry_plan(out) if args.dry_run else full_plan(out, commit, args.prototypes and args.prototypes.resolve())
    log = out / "device.log"
    log.write_text("", encoding="utf-8")
    device = torch.device("cpu" if args.dry_run else "cuda")
    machine = environment(device, torch.float32 if args.dry_run else torch.bfloat16, args.commit)
    found = run_stages(stages, log, deadline)
    for plot in out.glob("gluon/*.png"):  # of a few rows
        plot.unlink()
    print("\n" + write(out, found, machine, " ".join(["python recipes/benchmarks/device.py", *arguments])))
    return int(any(x.outcome in ("failed", "too long") or x.detail == "no time left" for x in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
