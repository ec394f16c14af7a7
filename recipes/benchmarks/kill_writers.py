"""Kill writers of checkpoints (SIGKILL) at random moments, and classify what they leave.

    python recipes/benchmarks/kill_writers.py --count 14 --seed 0

Each writer is forked from a process that has finished its imports, and is killed within its running time: a quarter of
the kills at any moment, the others after its first file. A kill after the end is not counted. `convert_checkpoint` and
`export_native` may leave nothing, the previous checkpoint or the new one, byte for byte, and files beside it that the
next run removes; anything else is a fault, and the exit status 1. (`save_pretrained` and the Trainer are transformers'
own, and write in place.) Needs fork: Linux or macOS.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import test_helpers_path  # noqa: F401
import torch
from markdown_table import table

from hf_qknorm import convert_checkpoint, export_native, patch_model, unpatch_model
from hf_qknorm.demo.training import byte_tokenizer
from hf_qknorm.files.atomic_io import is_leftover
from qknorm_tests.tiny import tiny_model

OUTCOMES = ("nothing", "old", "new", "fault")
OUT = "out"  # what writers write, in a folder of its own for each
TEXT = "to be, or not to be: that is the question. " * 40
SHARD = "2MB"
LIMIT = 120  # seconds that a process may take; one that hangs is a fault


@dataclass(frozen=True)
class Writer:
    """A writer of a folder, and the checkpoint that is there before."""

    write: Callable[[Path], object]
    old: Path | None = None

    def judge(self, left: Path, whole: Path) -> str:
        """Classify what a killed run leaves, given the result of a complete one."""
        if not left.exists():
            return "nothing"
        found = contents(left)
        if self.old is not None and found == contents(self.old):
            return "old"
        return "new" if found == contents(whole) else "fault"


def forked(run: Callable[[], object], log: Path) -> int:
    """Fork a process that runs `run` and exits with 0, or 1 on an error; return its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.alarm(LIMIT)
        torch.set_num_threads(1)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        run()
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def start(writer: Writer, folder: Path) -> tuple[int, set[str]]:
    """Start a writer on `folder / OUT`; return its process and the files that exist before."""
    shutil.rmtree(folder / OUT, ignore_errors=True)
    if writer.old is not None:
        shutil.copytree(writer.old, folder / OUT)
    there = listing(folder)
    return forked(partial(writer.write, folder / OUT), folder / "write.log"), there


def wait(child: int, until: Callable[[], bool]) -> int | None:
    """Wait for a process, but no longer than `until` says; return its exit status if it ends before."""
    while not until():
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    return None


def measure(writer: Writer, folder: Path) -> tuple[float, float]:
    """Write `folder / OUT` without a kill; return the seconds until its first file, and from there to its end."""
    times = [time.perf_counter()]
    child, there = start(writer, folder)
    for until in (lambda: listing(folder) != there, lambda: False):
        status = wait(child, until)
        times.append(time.perf_counter())
    if status:
        raise RuntimeError(f"the writer failed without a kill:\n{(folder / 'write.log').read_text()}")
    return times[1] - times[0], times[2] - times[1]


def kill(writer: Writer, folder: Path, whole: Path, seconds: float, after_first: bool) -> tuple[str, str] | None:
    """Kill a writer so many seconds after its start, or its first file; None if it ended before.

    Returns the outcome, and the details of a fault.
    """
    child, there = start(writer, folder)
    status = wait(child, lambda: listing(folder) != there) if after_first else None
    if status is None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        status = wait(child, lambda: False)
    if status == 0:
        return None
    if status != -signal.SIGKILL:
        return "fault", f"it failed by itself:\n{(folder / 'write.log').read_text()}"
    outcome = writer.judge(folder / OUT, whole)
    foreign = [x.name for x in folder.iterdir() if x.name.startswith(".") and not is_leftover(x)]
    if foreign:
        return "fault", f"{', '.join(foreign)} beside it is nothing that a later run would know"
    return outcome, ", ".join(sorted(contents(folder / OUT))) if outcome == "fault" else ""


def listing(folder: Path) -> set[str]:
    """Return the names of the files that writers make: staging folders, and files of the folder itself."""
    beside = {name for name in os.listdir(folder) if name.startswith(".")}
    return beside | {path.name for path in (folder / OUT).glob("*")}


def make_sources(model: Any, plain: Path, patched: Path, old: Path) -> None:
    """Make a checkpoint to convert, one to export, and one to replace."""
    patch_model(model, "qk_norm").save_pretrained(patched, max_shard_size=SHARD)
    unpatch_model(model).save_pretrained(plain, max_shard_size=SHARD)
    byte_tokenizer().save_pretrained(plain)
    convert_checkpoint(plain, old, "soft_cap")


def make_writers(work: Path) -> dict[str, Writer]:
    """Return the writers by name, with their checkpoints in `work`.

    The work is done in other processes: progress bars and loading would start threads here, which do not survive a
    fork.
    """
    plain, patched, old = places = tuple(work / name for name in ("plain", "patched", "old"))
    model = tiny_model("llama", vocab_size=8000, hidden_size=128)
    child = forked(partial(make_sources, model, *places), work / "sources.log")
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"no checkpoints to start from:\n{(work / 'sources.log').read_text()}")
    convert = partial(convert_checkpoint, plain, scheme="qk_norm_cap", standalone=False)
    return {
        "convert": Writer(convert),
        "convert, calibrated": Writer(partial(convert, calibration=[TEXT], method="moments")),
        "convert over an old one": Writer(partial(convert, overwrite=True), old),
        "convert with its code": Writer(partial(convert, standalone=True)),
        "export over an old one": Writer(partial(export_native, patched, overwrite=True), old),
    }


def run(count: int, seed: int, work: Path) -> tuple[dict[str, Counter[str]], list[str]]:
    """Kill each writer `count` times, and let it write once more; return the outcomes by writer, and the faults."""
    draw, outcomes, faults = random.Random(seed), {}, []
    for name, writer in make_writers(work).items():
        folder, whole = work / f"{name} killed", work / f"{name} whole" / OUT
        folder.mkdir()
        whole.parent.mkdir()
        measure(writer, whole.parent)  # the first is slower, and would have most kills come too late
        first, rest = measure(writer, whole.parent)
        found = outcomes[name] = Counter[str]()
        while found.total() < count:
            after_first = draw.random() < 0.75
            killed = kill(writer, folder, whole, draw.uniform(0, rest + first * (not after_first)), after_first)
            if killed is not None:
                found[killed[0]] += 1
                faults += [f"{name}: {killed[1]}"] if killed[1] else []
        measure(writer, folder)
        if listing(folder) != listing(whole.parent):
            faults.append(f"{name}: after the kills, a whole run leaves {', '.join(sorted(listing(folder)))}")
    return outcomes, faults


def main(arguments: list[str]) -> int:
    """Kill and classify; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=14, help="kills of each writer (default: 14)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    options = parser.parse_args(arguments)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}  # neither survives a fork
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="kill-writers-") as work:
        outcomes, faults = run(options.count, options.seed, Path(work))
    rows = [[name, str(found.total()), *(str(found[x]) for x in OUTCOMES)] for name, found in outcomes.items()]
    print("\n".join([*table(["writer", "kills", *OUTCOMES], rows), *faults]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
