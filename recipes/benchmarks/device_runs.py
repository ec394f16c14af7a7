"""Runs the stages of `device.py`, each in a process group with a time limit, and keeps what they print."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from device_stages import ROOT, Stage

LEAST = 10.0  # seconds in which no stage is worth starting
GRACE = 5.0  # seconds for a stage that is stopped to print what it has


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
        failed = [x.stage for x in found if x.stage == stage.after and x.outcome != "passed"]
        reason = stage.reason or (f"{stage.after!r} did not pass" if failed else "")
        if reason or left < LEAST:
            found.append(Outcome(stage.name, "skipped", 0.0, stage.seconds, reason or "no time left"))
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
