"""Two processes that work together, as two GPUs would: each runs a script with its rank in the environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

TESTS = Path(__file__).parent


def run_once(folder: Path, run: Callable[[Path], None]) -> Path:
    """`folder`, as `run` fills it: one of pytest's workers does that, and the others wait for it."""
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            filled = Path(tempfile.mkdtemp(dir=folder.parent))
            run(filled)
            filled.rename(folder)
    return folder


def run_pair(script: str, *arguments: object, expected: tuple[int, int] = (0, 0)) -> None:
    """Run a script of this folder as ranks 0 and 1; fail unless they end with the exit codes `expected`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [sys.executable, str(TESTS / script), *map(str, arguments)]
    runs = [
        subprocess.Popen(
            command,
            env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [run.communicate(timeout=240)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert tuple(run.returncode for run in runs) == expected, "\n".join(text[-3000:] for text in told)
