"""All that takes a Hopper GPU, in one command and nine minutes: tests, the Gluon kernel, times.

    python recipes/benchmarks/device.py --out results
    python recipes/benchmarks/device.py --out results --prototypes ../kernels

The kernels' tests natively (against the oracle's budget, the same bits on each run), those of graphs, streams,
inductor, training, 128k keys and more than 2³¹ numbers, the Gluon kernel beside the plain one, under compute-sanitizer,
and its own tests, the attention benchmark, and its most important rows with the Gluon kernel; then, if there is time
and a folder of them, `gpu_smoke.py` of the prototypes. Each stage is a process with a limit of its own. One that fails
or takes too long is ended and told, and the others go on, except those that would measure what was found wrong. Keeps
`device.log`, `device.csv`, `device.md` and the benchmark's files; exit code 0 if nothing failed.

`--dry-run` tries the script out without a GPU, each stage in its smallest form: its results mean nothing.
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
TESTS = ("tests/ops/triton", "tests/model/test_kernels_in_models.py", "tests/recipes/benchmarks/test_bench_model.py")
ON_CARD = ("tests/test_on_card.py", "tests/ops/test_large.py")  # the second takes up to 45 GB a test
GLUON = {"HF_QKNORM_GLUON": "1"}
CHECKED = "Gluon, checked"
PROCESSES = max((os.cpu_count() or 1) * 3 // 4, 1)  # of tests: they leave some CPUs to the compiler
LEAST = 10.0  # seconds in which no stage is worth starting


@dataclass(frozen=True)
class Stage:
    """A process, run from the repository's root; `missing` says why it can't run, `after` which stage must pass."""

    name: str
    command: tuple[str, ...]
    seconds: float
    settings: dict[str, str] = field(default_factory=dict)
    missing: str = ""
    after: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Kernels run natively unless the stage says otherwise, and the Gluon one is nobody's by accident."""
        inherited = {x: value for x, value in os.environ.items() if x not in ("TRITON_INTERPRET", *GLUON)}
        return inherited | {"PYTHONUNBUFFERED": "1"} | self.settings


@dataclass(frozen=True)
class Outcome:
    """What became of a stage: "passed", "failed", "too long", "skipped"; the end of what it said, or why."""

    stage: str
    outcome: str
    seconds: float
    limit: float
    detail: str


def python(*arguments: object) -> tuple[str, ...]:
    return (sys.executable, *map(str, arguments))


def tests(count: int, *arguments: str) -> tuple[str, ...]:
    """pytest on so many processes; it names each test, in case it is ended."""
    processes = ("-n", str(count)) if find_spec("xdist") else ()
    return python("-m", "pytest", "-o", "addopts=", "-v", "-p", "no:cacheprovider", *processes, *arguments)


def sanitized(tool: str) -> Stage:
    """The Gluon check under compute-sanitizer; without PyTorch's own allocator, which hides what is out of bounds."""
    found = shutil.which("compute-sanitizer")
    command = (found or "compute-sanitizer", "--tool", tool, "--error-exitcode", "1")
    check = python(HERE / "check_gluon.py", "--small")
    missing = "" if found else "no compute-sanitizer here"
    return Stage(f"Gluon, {tool}", command + check, 40, GLUON | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, missing)


def full_plan(out: Path, commit: tuple[str, ...], prototypes: Path | None) -> list[Stage]:
    """What matters most first."""
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
            "Gluon, tests", (*alone, "tests/ops/triton/test_gluon.py", "-k", "asked"), 60, interpreted, after=CHECKED
        ),
        Stage("benchmark", python(HERE / "bench_attention.py", "--help"), 60, interpreted),
        Stage("benchmark, Gluon", (), 0, missing=none, after=CHECKED),
        Stage("prototypes", (), 0, missing=none),
    ]


def run_stages(stages: list[Stage], log: Path, deadline: float) -> list[Outcome]:
    """Run them one after the other until the deadline, of `time.monotonic`; all they say goes to the log."""
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
    """Run it in a process group of its own: what it started ends with it."""
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
    """The end of what was said from there on."""
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(begin)
        return next((line.strip()[:120] for line in reversed(file.readlines()) if line.strip()), "")


def cells(x: Outcome) -> list[str]:
    return [x.stage, x.outcome, f"{x.seconds:.0f}", f"{x.limit:.0f}", x.detail.replace("|", "/")]


def faster(out: Path) -> list[list[str]]:
    """Our rows that both benchmarks have: times of the plain kernel and of the Gluon one, and their ratio."""
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


def write(out: Path, found: list[Outcome], told: dict[str, str], command: str) -> str:
    """Write the CSV and the page; returns the page."""
    with (out / "device.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["stage", "outcome", "seconds", "limit", "detail", *told])
        writer.writerows([x.stage, x.outcome, f"{x.seconds:.1f}", x.limit, x.detail, *told.values()] for x in found)
    where = f"{told['card']}: " + ", ".join(f"{x} {y}" for x, y in told.items() if x != "card")
    parts = ["# On a GPU", f"`{command}`", where + "."]
    parts.append(table(["stage", "outcome", "s", "limit", "it said last"], [cells(x) for x in found]))
    rows = faster(out)
    if rows:
        parts.append(table(["case", "what", "pass", "plain ms", "Gluon ms", "Gluon / plain"], rows))
    page = "\n\n".join(parts) + "\n"
    replace_text(out / "device.md", page)
    return page


def main(arguments: list[str]) -> int:
    """Run all stages; the exit code."""
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
    told = environment(device, torch.float32 if args.dry_run else torch.bfloat16, args.commit)
    found = run_stages(stages, log, deadline)
    for plot in out.glob("gluon/*.png"):  # of a few rows
        plot.unlink()
    print("\n" + write(out, found, told, " ".join(["python recipes/benchmarks/device.py", *arguments])))
    return int(any(x.outcome in ("failed", "too long") or x.detail == "no time left" for x in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
