"""What a number comes with: the machine, the versions, the commit, what other programs did; and turns."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import transformers

Result = TypeVar("Result")
Times = dict[str, list[float]]  # milliseconds, turn by turn


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def commit(measured: str = "hf_qknorm") -> str:
    """Return the commit, marked dirty if the measured code differs from it."""

    def git(*command: str) -> str:
        root = Path(__file__).parents[2]
        return subprocess.run(["git", "-C", root, *command], check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + ("-dirty" if git("status", "-s", measured) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def made() -> dict[str, str]:
    """Return the provenance of a run: machine, versions, commit, date."""
    vectors, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    cpu = f"{cpu_name()}, {vectors}, {threads} thread(s)"
    return {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def busy_seconds() -> tuple[float, float]:
    """Return the CPU seconds of the whole machine, and of this process."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    spent = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return spent, time.process_time()


def beside_others(measure: Callable[[], Result]) -> tuple[Result, str]:
    """The result of timings, and how busy other programs kept the machine meanwhile, in words."""
    (machine, own), start = busy_seconds(), time.perf_counter()
    result = measure()
    machine, own = (after - before for after, before in zip(busy_seconds(), (machine, own), strict=True))
    others = max(machine - own, 0) / (time.perf_counter() - start)
    return result, f"{os.cpu_count()} cores; other programs used {others:.2f} CPUs during the timings"


def by_turns(runs: dict[str, Callable[[], object]], turns: int) -> Times:
    """The milliseconds of each run, after two turns to warm up."""
    times: Times = {name: [] for name in runs}
    for turn in range(-2, turns):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times
