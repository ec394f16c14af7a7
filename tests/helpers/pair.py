"""Two processes that work together, as two GPUs would: forked from one that has imported what both need."""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import seeds  # noqa: F401  # the ranks draw what the test draws
from filelock import FileLock

PATIENCE = 240  # seconds


def run_once(factory: pytest.TempPathFactory, name: str, run: Callable[[Path], None]) -> Path:
    """The folder `name`, as `run` fills it: one of pytest's workers does that, and the others wait for it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            filled = Path(tempfile.mkdtemp(dir=folder.parent))
            run(filled)
            filled.rename(folder)
    return folder


def run_pair(script: str, *arguments: object, expected: tuple[int, int] = (0, 0)) -> None:
    """Call `main` of a script of this folder as ranks 0 and 1; fail unless they end with the exit codes `expected`."""
    command = [sys.executable, __file__, script, *map(str, arguments)]
    run = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-6000:]
    codes = tuple(json.loads(run.stdout.splitlines()[-1]))
    assert codes == expected, f"exit codes {codes}, expected {expected}:\n{run.stderr[-12000:]}"


def fork_pair(script: str, arguments: list[str]) -> list[int | None]:
    """The exit codes of both ranks."""
    work = importlib.import_module(script).main
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), WORLD_SIZE="2")
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(rank, work, arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE)
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def run_rank(rank: int, work: Callable[..., None], arguments: list[str]) -> None:
    faulthandler.enable()  # where it crashes
    faulthandler.dump_traceback_later(PATIENCE - 20)  # where it hangs, before it is killed
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    work(*arguments)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(fork_pair(sys.argv[1], sys.argv[2:])))
