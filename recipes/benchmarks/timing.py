"""Times of work that takes turns on a CPU or a GPU, and the peak of a GPU's memory.

A GPU is kept busy while the host queues a call, so that its time has no gaps between launches. The host's time is
measured too: it limits the pace of small work.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

Result = TypeVar("Result")
Work = Callable[[], object]
Times = dict[str, list[float]]  # milliseconds, turn by turn
CYCLES = 2_000_000  # of the GPU's clock, in a millisecond: a little more than there are
CALLS = 16  # between two events, at most: the queue to the device is not endless
ENOUGH = 1.0  # ms between two events, at least, where so many calls take as long


def by_turns(runs: dict[str, Work], turns: int, clock: Callable[[], float] = time.perf_counter) -> Times:
    """The milliseconds of each run on a CPU, after two turns to warm up; each turn has another order, by a seed."""
    times: Times = {name: [] for name in runs}
    names, order = list(runs), random.Random(0)
    for turn in range(-2, turns):
        order.shuffle(names)  # so that none always follows the same one, whose code and data are in the caches
        for name in names:
            start = clock()
            runs[name]()
            if turn >= 0:
                times[name].append(1e3 * (clock() - start))
    return times


def others_seconds() -> float:
    """The CPU seconds of all other programs on this machine so far."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()


def beside_others(measure: Callable[[], Result]) -> tuple[Result, str]:
    """The result of timings, and the CPUs that other programs used meanwhile, in words."""
    before, start = others_seconds(), time.perf_counter()
    result = measure()
    others = max(others_seconds() - before, 0) / (time.perf_counter() - start)
    return result, f"{os.cpu_count()} cores; other programs used {others:.2f} CPUs during the timings"


def in_process(run: Callable[[], Result]) -> Result:
    """The result of `run` in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run).result()


def peak_of(run: Work) -> int:
    """The largest resident size while it runs, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")  # ru_maxrss would count earlier peaks, those of the parent too
    run()
    return _resident("VmHWM")


def peak_rise(build: Callable[[], Work]) -> int:
    """The MiB by which the peak of a function from `build` is above the size before it, in a process of its own."""
    return in_process(partial(_rise, build))


def _rise(build: Callable[[], Work]) -> int:
    run, before = build(), _resident("VmRSS")
    return peak_of(run) - before


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


def cell(times: list[float]) -> str:
    """The median, and the fastest to the slowest."""
    return f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"


def ratio_cell(times: list[float], others: list[float]) -> str:
    """The median of the ratios within the turns, and their quartiles."""
    ratios = [mine / other for mine, other in zip(times, others, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


@dataclass
class Run:
    """Something to time, `call(n)` for the n-th set of inputs, and its milliseconds a call on device and host.

    `whole` measures memory in the place of `call`. A run that fails keeps the reason as `failure`.
    """

    call: Callable[[int], object]
    whole: Callable[[int], object] | None = None
    failure: str = ""
    peak_mib: float | None = None
    times: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    calls: int = 1
    pause: float = 0.0
    turn: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def reason(error: BaseException) -> str:
    """An error as one line."""
    lines = str(error).strip().splitlines() or [""]
    return "out of memory" if isinstance(error, torch.OutOfMemoryError) else f"{type(error).__name__}: {lines[0]}"[:160]


class Clock:
    """Times runs on a device; without a GPU it reads the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"

    def copies(self, size: int) -> int:
        """The number of sets of `size` bytes that are more than twice the cache, and two at least."""
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if self.cuda else 0
        return max(2, 1 + 2 * cache // size)

    def race(self, runs: dict[str, Work], turns: int) -> None:
        """Time all runs by turns; a run that fails is out of the race."""
        for run in runs.values():
            self._guarded(run, self._warm)
        for _ in range(turns):
            for run in runs.values():
                self._guarded(run, self._sample)

    def _guarded(self, run: Run, step: Callable[[Run], None]) -> None:
        if not run.failure:
            try:
                step(run)
            except Exception as error:  # another library's failure becomes a row with its reason
                run.failure = reason(error)
                self._synchronize()

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _warm(self, run: Run) -> None:
        """Compile, and find the memory, the calls of a sample, and the time for which the host is busy."""
        run.call(0)
        if not self.cuda:
            return
        self._synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        (run.whole or run.call)(0)
        self._synchronize()
        run.peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        start = time.perf_counter()
        run.call(1)
        run.pause = 1e3 * (time.perf_counter() - start)
        self._synchronize()
        run.calls = min(CALLS, max(1, round(ENOUGH / (1e3 * (time.perf_counter() - start)))))

    def _sample(self, run: Run) -> None:
        if self.cuda:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(int(CYCLES * min(1.2 * run.pause * run.calls + 0.1, 50)))
            start.record()
        began = time.perf_counter()
        for _ in range(run.calls):
            run.call(run.turn)
            run.turn += 1
        run.host.append(1e3 * (time.perf_counter() - began) / run.calls)
        if self.cuda:
            stop.record()
            self._synchronize()
            run.pause = run.host[-1]
        run.times.append(start.elapsed_time(stop) / run.calls if self.cuda else run.host[-1])
