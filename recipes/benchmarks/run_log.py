"""A log of finished runs, from which an interrupted sweep continues."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from machine import made
from transformers import HfArgumentParser

from hf_qknorm.files.atomic_io import replace_text

Row = dict[str, Any]


def thinned(losses: list[float], points: int) -> list[float]:
    """Return the means of about `points` equal stretches; a stretch with NaN or infinity keeps it."""
    width = max(len(losses) // points, 1)
    stretches = [losses[i : i + width] for i in range(0, len(losses), width)]
    return [round(sum(stretch) / len(stretch), 4) for stretch in stretches]


class Runs:
    """Finished runs, one line of JSON each: settings, result, and provenance."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, FileLock(f"{path}.lock")
        self.rows: list[Row] = []
        self.used: list[Row] = []  # those that were asked for: a file may hold other sweeps' as well
        self.made = made()
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.lock:
            self._read()

    def get(self, settings: Row, run: Callable[[], Row]) -> Row:
        """Return the result of the run with these settings: an earlier one, or that of `run`, which is stored."""
        found = self._row(settings)
        if found is None:
            line = json.dumps({"settings": settings, "result": run(), "made": self.made})
            with self.lock:
                self._read()  # another process may have stored this run meanwhile
                found = self._row(settings)
                if found is None:
                    with self.path.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")
                    found = json.loads(line)  # as it will be read again
                    self.rows.append(found)
        self.used.append(found)
        return found["result"]

    def find(self, settings: Row) -> Row | None:
        """Return the result of the run with these settings; None if there is none."""
        found = self._row(settings)
        if found is not None and found not in self.used:
            self.used.append(found)
        return None if found is None else found["result"]

    def _row(self, settings: Row) -> Row | None:
        return next((row for row in self.rows if row["settings"] == settings), None)

    def _read(self) -> None:
        """Read the rows. A last line without its end is cut off: under the lock, its writer must have been killed."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        lines, end, rest = text.rpartition("\n")
        self.rows = [json.loads(line) for line in lines.splitlines()]
        if rest or not self.path.exists():
            replace_text(self.path, lines + end)

    def run_all(
        self, wanted: list[Row], run: Callable[[Row], Row | None], jobs: int = 1, minutes: float = math.inf
    ) -> bool:
        """Store `run(settings)` for each of the settings without a result, in `jobs` processes with a thread each.

        No run starts after `minutes`. A run that returns None stored its state, and continues when it is called again.
        Returns whether all settings have a result, which `get` then returns. With several processes `run` must be a
        function of a module, or a `functools.partial` of one.
        """
        known = [row["settings"] for row in self.rows]
        missing = [settings for i, settings in enumerate(wanted) if settings not in known + wanted[:i]]
        left = len(missing)
        for settings, result in _results(missing, run, jobs, time.monotonic() + 60 * minutes):
            if result is not None:
                self.get(settings, lambda result=result: result)  # type: ignore[misc]
                self.used.pop()
                left -= 1
                print(f"{left} to do; done: {settings}", flush=True)
        return left == 0


def _results(
    wanted: list[Row], run: Callable[[Row], Row | None], jobs: int, end: float
) -> Iterator[tuple[Row, Row | None]]:
    """Yield settings and results of runs as they finish; none starts after the time `end`."""
    waiting = iter(wanted)
    if jobs == 1:
        yield from ((settings, run(settings)) for settings in takewhile(lambda _: time.monotonic() < end, waiting))
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        running = {pool.submit(run, settings): settings for settings in islice(waiting, jobs)}
        while running:
            done = wait(running, return_when=FIRST_COMPLETED).done
            if any(future.exception() for future in done):
                done = wait(running).done  # the results of the others are kept
            for future in sorted(done, key=lambda future: future.exception() is not None):
                yield running.pop(future), future.result()
            if time.monotonic() < end:
                running |= {pool.submit(run, settings): settings for settings in islice(waiting, jobs - len(running))}


def provenance(rows: list[Row]) -> str:
    """Format every value of the provenance among the rows, in one line."""
    named = {name: list(dict.fromkeys(row["made"][name] for row in rows)) for name in rows[0]["made"]}
    return "; ".join(f"{name} {', '.join(values)}" for name, values in named.items()) + "."


def parse(options: Any, command: list[str] | None) -> tuple[Any, Runs]:
    """The options from the command line, and the log of their runs. The process computes with one thread."""
    (found,) = HfArgumentParser(options).parse_args_into_dataclasses(command)
    logging.getLogger("hf_qknorm").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    return found, Runs(found.out.with_suffix(".jsonl"))
