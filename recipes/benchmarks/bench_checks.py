"""Checks before the benchmark: every implementation must be right. The checks also compile what is timed later.

Each job runs in a process of its own. Many compile in parallel, the timing process finds their kernels in the caches of
Triton and inductor, and a job that crashes or hangs does not affect the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import test_helpers_path  # noqa: F401
import torch
from bench_cases import Case, Inputs, draw, exactly, judge, oracle, results
from bench_implementations import Implementation
from bench_timing import reason

from qknorm_tests.error_budget import Verdict

MARK = "@verdict "
SECONDS = 150  # for a job


@dataclass(frozen=True)
class Job:
    """The implementations that share a case, and the cases in which each is timed."""

    case: Case
    implementations: tuple[Implementation, ...]
    timed: tuple[tuple[Case, ...], ...] = ()

    def known(self, verdicts: Container[tuple[str, str]]) -> bool:
        """Whether all verdicts are known, and nothing is left to compile."""
        return all((str(self.case), x.name) in verdicts and not x.compiled for x in self.implementations)


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


class Checks:
    """The verdicts so far, by case and implementation; cases are checked at `length`."""

    def __init__(self, length: int, arguments: list[str], processes: int) -> None:
        self.length, self.arguments, self.processes = length, arguments, processes
        self.verdicts: dict[tuple[str, str], Checked] = {}

    def run(self, part: int, jobs: list[Job], seconds: float) -> list[str]:
        """Run the jobs of a part whose verdicts are not known; returns the failures of ours."""
        start = time.monotonic()
        needed = {n: job for n, job in enumerate(jobs) if not job.known(self.verdicts)}
        verdicts = run_checks(needed, part, self.arguments, self.processes, min(SECONDS, seconds)) if needed else []
        self.verdicts |= {(x.case, x.what): x for x in verdicts}
        failed = [str(verdict) for verdict in verdicts if verdict.ours and not verdict.passed]
        spent = time.monotonic() - start
        print(f"checks: {len(verdicts)} verdicts, {len(failed)} failures of ours, {spent:.0f} s", flush=True)
        return failed

    def of(self, case: Case, implementation: Implementation) -> Checked | None:
        return self.verdicts.get((str(case.at(self.length)), implementation.name))

    def objection(self, case: Case, implementation: Implementation, device: str) -> str | None:
        """The reason why an implementation is not timed, or None.

        Another library's errors are no reason: they are shown beside its times.
        """
        judged = self.of(case, implementation)
        missing = implementation.missing(case, device)
        if missing:
            return missing
        if judged is None:
            return "not timed: no result of its check"
        if judged.failure:
            return f"not timed: {judged.failure}"
        return "not timed: failed its check" if implementation.ours and not judged.passed else None


def check_job(job: Job, device: torch.device, dtype: torch.dtype) -> Iterator[Checked]:
    """Check the implementations of a job, in this process."""
    (x,) = draw(job.case, 1, device, dtype)
    for implementation, cases in zip(job.implementations, job.timed, strict=True):
        if not implementation.missing(job.case, device.type):
            errors = partial(judge_implementation, implementation, job.case, x)
            yield judged(str(job.case), implementation.name, implementation.ours, errors)
            if device.type == "cuda" and (implementation.ours or implementation.compiled):
                for case in cases:
                    compile_for(implementation, case, device, dtype)


def compile_for(implementation: Implementation, case: Case, device: torch.device, dtype: torch.dtype) -> None:
    """Run all passes at full size, so that the caches hold every kernel that is timed later.

    A failure, such as a lack of memory beside the other processes, is left to the timing process, which reports it.
    """
    with suppress(Exception):
        (x,) = implementation.prepared(case, draw(case, 1, device, dtype))
        results(lambda y: implementation.attend(case, y), x, implementation.leaves(case, device.type))
    torch.cuda.empty_cache()


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


def run_checks(
    jobs: dict[int, Job], part: int, arguments: list[str], processes: int, seconds: float = SECONDS
) -> list[Checked]:
    """Return the verdicts of some jobs of a part, by number, each from a process of its own, or all from a single one.

    A process may take so many seconds. Verdicts are printed as they come.
    """
    numbers = [[n] for n in jobs] if processes > 1 else [list(jobs)]

    def run(mine: list[int]) -> list[Checked]:
        verdicts, complaint = run_process([*arguments, "--checks-of", *map(str, (part, *mine))], seconds)
        known = {(verdict.case, verdict.what) for verdict in verdicts}
        lost = [Checked(*named, {}, complaint) for n in mine for named in expected(jobs[n])]
        if complaint:
            verdicts += [verdict for verdict in lost if (verdict.case, verdict.what) not in known]
        print(*verdicts, sep="\n", flush=True)  # what follows may take a while
        return verdicts

    with ThreadPoolExecutor(processes) as pool:
        return [verdict for verdicts in pool.map(run, numbers) for verdict in verdicts]


def expected(job: Job) -> list[tuple[str, str, bool]]:
    """Return the verdicts that a job must give, as case, name, and whether the implementation is ours."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    present = [x for x in job.implementations if not x.missing(job.case, device)]
    return [(str(job.case), x.name, x.ours) for x in present]


def run_process(arguments: list[str], seconds: float) -> tuple[list[Checked], str]:
    """Return the verdicts that a process prints, and the reason if it failed."""
    script = Path(__file__).with_name("bench_attention.py")
    complaint = ""
    try:
        run = subprocess.run(
            [sys.executable, script, *arguments],
            env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"},  # each of the many processes has its own
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        text = run.stdout
        if run.returncode:
            complaint = f"the process ended with {run.returncode}: {(run.stderr.strip().splitlines() or [''])[-1]}"[
                :160
            ]
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        complaint = f"took longer than {seconds:.0f} s"
    lines = [json.loads(x.removeprefix(MARK)) for x in text.splitlines() if x.startswith(MARK)]
    return [Checked(**x | {"errors": {name: Verdict(*v) for name, v in x["errors"].items()}}) for x in lines], complaint
