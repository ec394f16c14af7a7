"""Two processes that work together, as two GPUs would: a pair for each task, forked from a process with all imports."""

import faulthandler
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from torch.multiprocessing import start_processes
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from qknorm_tests import seeds  # noqa: F401  # the ranks draw what the test draws

PATIENCE = 240  # seconds for a task
GRACE = 20  # seconds for a rank whose partner has failed


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


def run_pairs(script: str, folder: Path, tasks: Sequence[str]) -> None:
    """Call `main(task, folder)` of a script of this package as ranks 0 and 1, for one task after the other.

    A pair that fails leaves a report for `of_task`, and the other tasks run.
    """
    command = [sys.executable, "-m", "qknorm_tests.pair", script, str(folder), *tasks]
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-6000:]


def run_in_turn(
    factory: pytest.TempPathFactory,
    script: str,
    few: Sequence[str],
    tasks: Sequence[str],
    prepare: Callable[[Path, Sequence[str]], None] = lambda folder, tasks: None,
) -> Callable[[str], Path]:
    """The folder of each task of a script: the `few` run together, and the others when the first of them is wanted."""

    def folder(task: str) -> Path:
        part = few if task in few else [x for x in tasks if x not in few]

        def run(root: Path) -> None:
            prepare(root, part)
            run_pairs(script, root, part)

        return of_task(run_once(factory, f"{script}-{'few' if task in few else 'others'}", run), task)

    return folder


def of_task(folder: Path, task: str) -> Path:
    """The folder of `run_pairs`; fails with the report of both ranks if the task's pair failed."""
    report = folder / f"{task}.failed"
    if report.exists():
        pytest.fail(report.read_text(), pytrace=False)
    return folder


def run_pair(main: Callable[[str, str], None], task: str, folder: str) -> None:
    """Run both ranks; a report holds the trace of one that fails, or where each is that takes too long."""
    end, arguments = time.monotonic() + PATIENCE, (main, task, folder)
    ranks = start_processes(run_rank, arguments, nprocs=2, join=False, start_method="fork")
    try:
        while not ranks.join(timeout=5, grace_period=GRACE):
            if time.monotonic() > end:
                raise TimeoutError(f"{task} takes longer than {PATIENCE} s")
    except Exception as error:
        logs = [log.read_text(errors="replace")[-8000:] for log in sorted(Path(folder).glob(f"{task}.*.log"))]
        Path(folder, f"{task}.failed").write_text("\n-- rank\n".join([f"{task}: {error}", *logs]))
        for rank in ranks.processes:
            rank.kill()


def run_rank(rank: int, main: Callable[[str, str], None], task: str, folder: str) -> None:
    with Path(folder, f"{task}.{rank}.log").open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    faulthandler.enable()  # where it crashes
    faulthandler.dump_traceback_later(PATIENCE - 10)  # where it waits
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    store = Path(folder, f"{task}.store").absolute()  # a port that is free now may be taken a moment later
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    main(task, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    script = importlib.import_module(f"qknorm_tests.{sys.argv[1]}")
    get_checkpoint_conversion_mapping("llama")  # transformers builds a table once, in half the time of a short task
    for name in sys.argv[3:]:
        run_pair(script.main, name, sys.argv[2])
