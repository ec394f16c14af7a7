"""Times of GPU work: device time by turns, and the peak of memory.

The device is kept busy while the host queues a call, so that its time has no gaps between launches. The host's time is
measured too: it limits the pace of small work. Without a GPU the host's clock is read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

CYCLES = 2_000_000  # of the GPU's clock, in a millisecond: a little more than there are
CALLS = 16  # between two events, at most: the queue to the device is not endless
ENOUGH = 1.0  # ms between two events, at least, where so many calls take as long
FEWEST, MOST = 5, 40


class Dead(RuntimeError):
    """The device takes no more work: an illegal access ends all work of a process."""


@dataclass
class Run:
    """Something to time, `call(n)` for the n-th set of inputs, and what came of it: ms a call, the host's and all."""

    call: Callable[[int], object]
    whole: Callable[[int], object] | None = None  # measures memory in the place of `call`
    failure: str | None = None
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
    """Return an error as one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


class Clock:
    """Times runs on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise Dead(reason(error)) from error

    def clear(self) -> None:
        if self.cuda:
            torch.cuda.empty_cache()

    def copies(self, size: int) -> int:
        """How many sets of `size` bytes are more than twice the cache, and two at least."""
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if self.cuda else 0
        return max(2, 1 + 2 * cache // size)

    def peak(self, call: Callable[[], object]) -> float:
        """MiB that the call takes at its height, its results among them, above what was there."""
        self.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def race(self, runs: dict[str, Run], seconds: float) -> None:
        """Time all, taking turns, `seconds` each; a run that fails keeps its reason and is out of the race."""
        for run in runs.values():
            self._guarded(run, self._warm)
        least, most = (FEWEST, MOST) if self.cuda else (2, 2)
        for turn in range(most):
            for run in runs.values():
                if run.failure is None and (turn < least or sum(run.times) * run.calls < 1e3 * seconds):
                    self._guarded(run, self._sample)

    def _guarded(self, run: Run, step: Callable[[Run], None]) -> None:
        if run.failure is not None:
            return
        try:
            step(run)
        except Dead:
            raise
        except Exception as error:  # another library's failure becomes a row with its reason
            run.failure = reason(error)
            del error
            self.synchronize()
            self.clear()

    def _warm(self, run: Run) -> None:
        """Compile, and find out how much memory it takes, how many calls a sample, and how long the host is busy."""
        if not self.cuda:
            return
        run.call(0)
        self.synchronize()
        run.peak_mib = self.peak(lambda: (run.whole or run.call)(0))
        estimates = []
        for n in range(2):
            start = time.perf_counter()
            run.call(1 + n)
            run.pause = 1e3 * (time.perf_counter() - start)
            self.synchronize()
            estimates.append(1e3 * (time.perf_counter() - start))
        run.calls = min(CALLS, max(1, round(ENOUGH / min(estimates))))

    def _sample(self, run: Run) -> None:
        if not self.cuda:
            start = time.perf_counter()
            run.call(run.turn)
            run.times.append(1e3 * (time.perf_counter() - start))
            run.host.append(run.times[-1])
            run.turn += 1
            return
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(CYCLES * min(1.2 * run.pause * run.calls + 0.1, 50)))
        start.record()
        began = time.perf_counter()
        for _ in range(run.calls):
            run.call(run.turn)
            run.turn += 1
        run.host.append(1e3 * (time.perf_counter() - began) / run.calls)
        stop.record()
        self.synchronize()
        run.times.append(start.elapsed_time(stop) / run.calls)
        run.pause = run.host[-1]
