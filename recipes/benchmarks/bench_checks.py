"""Checks before the benchmark: every implementation must be right. The checks also compile its kernels.

Each job runs in a process of its own. Many compile in parallel, the timing process finds their kernels in Triton's
cache, and a job that crashes or hangs does not affect the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import test_helpers_path  # noqa: F401
import torch
from bench_cases import Case, Inputs, draw, exactly, judge, oracle, results
from bench_implementations import Implementation
from bench_model import Size
from bench_model import check as check_model
from bench_timing import reason
from error_budget import Verdict

MARK = "@verdict "
SECONDS = 150  # for a job
MODEL = "training step"


@dataclass(frozen=True)
class Job:
    """The implementations that share a case; without a case, a model to train."""

    case: Case | None
    implementations: tuple[Implementation, ...] = ()
    model: Size | None = None


@dataclass(frozen=True)
class Checked:
    """The result of a check: the worst result with its errors, or the reason for its absence."""

    case: str
    what: str
    ours: bool
    errors: dict[str, Verdict]
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and all(verdict.passed for verdict in self.errors.values())

    def error(self, kind: str) -> float | None:
        """The largest error of a pass."""
        errors = {name: verdict.error for name, verdict in self.errors.items()}
        if kind != "both":
            errors = {name: e for name, e in errors.items() if (name == "out") == (kind == "forward")} or errors
        return max(errors.values(), default=None)

    def __str__(self) -> str:
        result = self.failure or ", ".join(
            f"{name} {v.error:.1e}" + ("" if v.passed else f" over its budget of {v.budget:.1e}")
            for name, v in self.errors.items()
        )
        return f"{'passed' if self.passed else 'FAILED'} {self.case} | {self.what}: {result}"


def check_job(job: Job, device: torch.device, dtype: torch.dtype) -> Iterator[Checked]:
    """Check the implementations of a job, in this process."""
    if job.model is not None:
        yield judged(str(job.model), MODEL, True, lambda: check_model(job.model, device, dtype))
    if job.case is None:
        return
    (x,) = draw(job.case, 1, device, dtype)
    for implementation in job.implementations:
        if not implementation.missing(job.case, device.type):
            errors = partial(judge_implementation, implementation, job.case, x)
            yield judged(str(job.case), implementation.name, implementation.ours, errors)


def judged(case: str, what: str, ours: bool, errors: Callable[[], dict[str, Verdict]]) -> Checked:
    try:
        return Checked(case, what, ours, errors())
    except Exception as error:
        return Checked(case, what, ours, {}, reason(error))


def judge_implementation(implementation: Implementation, case: Case, x: Inputs) -> dict[str, Verdict]:
    """Errors of the output and, where there is a backward pass, of the gradients."""
    (x,) = implementation.prepared(case, [x])
    names = implementation.leaves(case, x.q.device.type)
    what = (implementation.normed, implementation.softcap)
    exact = results(lambda y: oracle(case, y, *what), exactly(x), names)
    eager = results(lambda y: oracle(case, y, *what), x, names)
    return judge(results(lambda y: implementation.attend(case, y), x, names), exact, eager)


def print_verdicts(jobs: list[Job], device: torch.device, dtype: torch.dtype) -> None:
    """Run the checks of one process, and print the verdicts."""
    for job in jobs:
        for verdict in check_job(job, device, dtype):
            print(MARK + json.dumps(asdict(verdict)), flush=True)


def run_checks(jobs: list[Job], arguments: list[str], processes: int) -> list[Checked]:
    """Return the verdicts of all jobs, each from a process of its own, or all from a single one."""
    numbers = [[n] for n in range(len(jobs))] if processes > 1 else [list(range(len(jobs)))]

    def run(mine: list[int]) -> list[Checked]:
        verdicts, complaint = run_process([*arguments, "--checks-of", *map(str, mine)])
        known = {(verdict.case, verdict.what) for verdict in verdicts}
        lost = [Checked(case, what, True, {}, complaint) for n in mine for case, what in expected(jobs[n])]
        return verdicts + (
            [verdict for verdict in lost if (verdict.case, verdict.what) not in known] if complaint else []
        )

    with ThreadPoolExecutor(processes) as pool:
        return [verdict for verdicts in pool.map(run, numbers) for verdict in verdicts]


def expected(job: Job) -> list[tuple[str, str]]:
    """Return the verdicts that a job must give on our own implementations."""
    ours = [(str(job.case), implementation.name) for implementation in job.implementations if implementation.ours]
    return ours if job.model is None else [*ours, (str(job.model), MODEL)]


def run_process(arguments: list[str]) -> tuple[list[Checked], str]:
    """Return the verdicts that a process prints, and the reason if it failed."""
    script = Path(__file__).with_name("bench_attention.py")
    complaint = ""
    try:
        run = subprocess.run(
            [sys.executable, script, *arguments],
            env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"},  # each of the many processes has its own
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        text = run.stdout
        if run.returncode:
            complaint = f"the process ended with {run.returncode}: {(run.stderr.strip().splitlines() or [''])[-1]}"[
                :160
            ]
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        complaint = f"took longer than {SECONDS} s"
    lines = [json.loads(x.removeprefix(MARK)) for x in text.splitlines() if x.startswith(MARK)]
    return [Checked(**x | {"errors": {name: Verdict(*v) for name, v in x["errors"].items()}}) for x in lines], complaint
