"""Run everything that needs a Hopper GPU in one command and nine minutes: benchmarks and tests.

    python recipes/benchmarks/device.py --out results
    python recipes/benchmarks/device.py --out results --only attention

The stages, the most important first: the attention benchmark, whose checks come before its times; the tests of kernels;
a model's training step; the tests of graphs, streams, inductor and training; those of 128k keys and more than 2³¹
numbers; the Gluon kernel under compute-sanitizer; `hf-qknorm doctor`. Each is a process with a limit of time. A stage
that is late is interrupted, keeps what it wrote, and the next one runs. Prints a table, and writes `device.md`,
`device.log` and the benchmarks' files; the exit status is 0 if nothing failed.

`--dry-run` tries all command lines out without a GPU, and runs as little as possible.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from page import ROOT, provenance, publish, table

HERE = Path(__file__).parent
KERNELS = ("tests/ops/triton", "tests/ops/test_attention.py", "tests/ops/test_norm_rope.py",
           "tests/model/test_kernels_in_models.py", "tests/recipes/benchmarks/test_bench_model.py")  # fmt: skip
SANITIZED = "tests/ops/triton/test_gluon.py::test_normed_heads_of_any_size[50.0-within]"
LEAST, GRACE = 10.0, 5.0  # seconds in which no stage is worth starting, and those for an interrupted one to end


@dataclass(frozen=True)
class Stage:
    """A process in the repository's root, with its limit in seconds; `dry` are arguments to end soon."""

    name: str
    seconds: float
    command: tuple[str, ...]
    dry: tuple[str, ...] = ("--help",)
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Kernels run natively, and no C++ is compiled. Inductor has few threads, since there are many processes."""
        inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        own = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path, "HF_QKNORM_CPU": "0", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
        return inherited | own | self.settings


def python(*arguments: object) -> tuple[str, ...]:
    return (sys.executable, *map(str, arguments))


def pytest(name: str, seconds: float, processes: int, *files: str) -> Stage:
    spread = ("--numprocesses", processes, "--dist", "worksteal")
    command = python("-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "--verbose", *spread, *files)
    return Stage(name, seconds, command, ("--collect-only", "--quiet"))


def sanitized(tool: str) -> Stage:
    """The Gluon kernel under compute-sanitizer, without PyTorch's allocator, which hides accesses out of bounds."""
    checked = python("-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", SANITIZED)
    command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *checked)
    return Stage(f"Gluon, {tool}", 20, command, settings={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def plan(out: Path) -> list[Stage]:
    """All stages; their limits fit into nine minutes."""
    cores = os.cpu_count() or 1
    attention = python(HERE / "bench_attention.py", "--minutes", "2.5", "--out", out / "attention")
    step = python(HERE / "bench_model.py", "--size", "135m", "--output", out / "step.md")
    doctor = python("-c", "import sys; from hf_qknorm.cli import main; sys.exit(main())", "doctor")
    return [
        Stage("attention", 200, attention),
        pytest("tests of kernels", 120, cores, *KERNELS),
        Stage("training step", 60, step),
        pytest("tests on the card", 40, min(cores, 8), "tests/test_on_card.py"),
        pytest("tests of large inputs", 30, 1, "tests/ops/test_large.py"),
        sanitized("memcheck"),
        sanitized("racecheck"),
        Stage("doctor", 25, doctor),
    ]


def run(stage: Stage, command: Sequence[str], log: Path, limit: float) -> tuple[str, str]:
    """Run a stage; return its outcome and the last line that it printed."""
    if shutil.which(command[0]) is None:
        return "skipped", f"no {command[0]} here"
    with log.open("a+", encoding="utf-8", errors="replace") as file:
        file.write(f"\n== {stage.name}, at most {limit:.0f} s: {' '.join(command)}\n")
        file.flush()
        begin = file.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, env=stage.environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            outcome = "failed" if process.wait(limit) else "passed"
        except subprocess.TimeoutExpired:
            outcome = "too long"
            process.send_signal(signal.SIGINT)  # lets pytest print its failures
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        file.seek(begin)
        lines = [line.strip() for line in file if line.strip()]
    return outcome, (lines or [""])[-1][:120].replace("|", "/")


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for log, CSV and pages")
    parser.add_argument("--minutes", type=float, default=9, help="for all of it (default: 9)")
    names = [stage.name for stage in plan(Path())]
    parser.add_argument("--only", nargs="+", choices=names, help="these stages")
    parser.add_argument("--dry-run", action="store_true", help="try the command lines out without a GPU")
    args = parser.parse_args(arguments)
    end, out = time.monotonic() + 60 * args.minutes, args.out.resolve()
    if not args.dry_run and not torch.cuda.is_available():
        print("device.py needs a Hopper GPU; --dry-run tries it out without one", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    stages = [stage for stage in plan(out) if not args.only or stage.name in args.only]
    rows = []
    for stage in stages:
        start = time.monotonic()
        limit = min(stage.seconds, end - start)
        command = (*stage.command, *stage.dry) if args.dry_run else stage.command
        found = ("skipped", "no time left") if limit < LEAST else run(stage, command, out / "device.log", limit)
        rows.append([stage.name, found[0], f"{time.monotonic() - start:.0f}", f"{limit:.0f}", found[1]])
        print(" | ".join(rows[-1]), flush=True)
    lines = table(["stage", "outcome", "s", "limit", "it said last"], rows, "llrrl")
    publish("On a GPU", __doc__, provenance(), lines, out / "device")
    return int(any(row[1] in ("failed", "too long") or row[4] == "no time left" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
