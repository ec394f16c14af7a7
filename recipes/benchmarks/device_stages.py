"""The stages of `device.py`, their shares of the time and their form without a GPU; and how they run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TESTS = (
    "tests/ops/triton",
    "tests/model/test_kernels_in_models.py",
    "tests/model/test_kernels_with_caches.py",
    "tests/recipes/benchmarks/test_bench_model.py",
)
ON_CARD, LARGE = "tests/test_on_card.py", "tests/ops/test_large.py"
LARGE_BYTES = 60e9  # of the device's memory, for a process of LARGE
SANITIZED = f"{TESTS[0]}/test_gluon.py::test_normed_heads_of_any_size[50.0-usual]"
CORES = os.cpu_count() or 1
LEAST = 10.0  # seconds in which no stage is worth starting
GRACE = 5.0  # seconds for a stage that is stopped to print what it has


@dataclass(frozen=True)
class Stage:
    """A process in the repository's root, and its share of the time in seconds.

    `wrapper` is a program that runs the command. `dry` are the arguments that make the command end soon, without a GPU.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    dry: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """The reason why it cannot run, or nothing."""
        absent = self.wrapper and shutil.which(self.wrapper[0]) is None
        return f"no {self.wrapper[0]} here" if absent else ""

    @property
    def environment(self) -> dict[str, str]:
        """Kernels run natively, unless the stage says otherwise, and without the check of their first use: each stage
        makes its own. No C++ kernels are compiled. Inductor has few threads, since a stage has many processes.
        """
        inherited = {x: value for x, value in os.environ.items() if x != "TRITON_INTERPRET"}
        path = os.pathsep.join(filter(None, (str(ROOT), str(HERE), os.environ.get("PYTHONPATH"))))
        own = {
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": path,
            "HF_QKNORM_CHECK": "0",
            "HF_QKNORM_CPU": "0",
            "TORCHINDUCTOR_COMPILE_THREADS": "2",
        }
        return inherited | own | self.settings

    def dried(self) -> Stage:
        """The stage without a GPU: its command line is read, and as little as possible is done."""
        settings = self.settings | {"TRITON_INTERPRET": "1"}
        return Stage(self.name, self.command + self.dry, 240, settings=settings)


def python(*arguments: object) -> tuple[str, ...]:
    return (sys.executable, *map(str, arguments))


def tests(name: str, processes: int, seconds: float, *arguments: str, **options: object) -> Stage:
    """A stage of pytest on so many processes; it prints each test, in case it is stopped."""
    spread = ("--numprocesses", str(processes), "--dist", "worksteal", "-p", "print_failures")
    command = python("-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "--verbose", *spread, *arguments)
    return Stage(name, command, seconds, ("--collect-only", "--quiet"), **options)


def large_processes() -> int:
    """Processes whose tensors the device's memory holds together."""
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    return max(int(memory / LARGE_BYTES), 1)


def sanitized(tool: str) -> Stage:
    """The Gluon kernel under compute-sanitizer, without PyTorch's allocator, which hides accesses out of bounds."""
    return Stage(
        f"Gluon, {tool}",
        python("-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", SANITIZED),
        20,
        dry=("--collect-only", "--quiet"),
        settings={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        wrapper=("compute-sanitizer", "--tool", tool, "--error-exitcode", "1"),
    )


def full_plan(out: Path, commit: tuple[str, ...] = ()) -> list[Stage]:
    """All stages, the most important first. Their shares fit into nine minutes."""
    bench = HERE / "bench_attention.py"
    rows = ("--minutes", "2.1", "--keep-going", "--out", out, *commit)
    bench_model, steps = HERE / "bench_model.py", ("--size", "135m", "--losses", 100, "--output", out / "step.md")
    doctor = python("-c", "import sys; from hf_qknorm.cli import main; sys.exit(main())", "doctor")
    return [
        Stage("first checks", python(bench, "--first", "--processes", 5), 70, ("--list",)),
        Stage("benchmark", python(bench, *rows), 140, ("--list",)),
        tests("tests", CORES, 100, *TESTS),
        Stage("training step", python(bench_model, *steps), 60, ("--help",)),
        tests("tests, on the card", min(CORES, 8), 30, ON_CARD),
        tests("tests, large", large_processes(), 25, LARGE),
        sanitized("memcheck"),
        sanitized("racecheck"),
        Stage("doctor", doctor, 22, settings={"HF_QKNORM_CHECK": "1"}),
    ]


@dataclass(frozen=True)
class Outcome:
    """The end of a stage: "passed", "failed", "too long" or "skipped", with its last output or the reason."""

    stage: str
    outcome: str
    seconds: float
    limit: float
    detail: str


def run_stages(stages: list[Stage], log: Path, deadline: float) -> list[Outcome]:
    """Run the stages in order until the deadline (`time.monotonic`); their output goes to the log.

    Each gets its share of the time, and what the ones before it have left of theirs.
    """
    found: list[Outcome] = []
    for number, stage in enumerate(stages):
        left = deadline - time.monotonic()
        spare = left - sum(x.seconds for x in stages[number:] if not x.reason)
        limit = min(stage.seconds + max(spare, 0.0), left)
        if stage.reason or left < LEAST:
            found.append(Outcome(stage.name, "skipped", 0.0, stage.seconds, stage.reason or "no time left"))
        else:
            found.append(run_stage(stage, log, limit))
        print(" | ".join(cells(found[-1])), flush=True)
    return found


def run_stage(stage: Stage, log: Path, limit: float) -> Outcome:
    """Run a stage in a process group, which ends with it."""
    start = time.monotonic()
    command = (*stage.wrapper, *stage.command)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"\n== {stage.name}, at most {limit:.0f} s: {' '.join(command)}\n")
        begin = file.tell()
        file.flush()
        process = subprocess.Popen(
            command, cwd=ROOT, env=stage.environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=heed_interrupts,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            stop(process)
            code = None
    seconds = time.monotonic() - start
    outcome = "too long" if code is None else "failed" if code else "passed"
    return Outcome(stage.name, outcome, seconds, limit, last_line(log, begin))


def heed_interrupts() -> None:
    """End at SIGINT, which a run in the background ignores, and its children with it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process, which lets pytest print its failures; then end its group."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path, begin: int) -> str:
    """Return the last line of the log after position `begin`."""
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(begin)
        return next((line.strip()[:120] for line in reversed(file.readlines()) if line.strip()), "")


def cells(x: Outcome) -> list[str]:
    return [x.stage, x.outcome, f"{x.seconds:.0f}", f"{x.limit:.0f}", x.detail.replace("|", "/")]
