"""One of two processes, of which rank 1 fails in the middle of some tasks."""

from __future__ import annotations

import faulthandler
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

EXPECTED = {"expected": (1, 3)}


def crash() -> None:
    faulthandler._sigsegv()


def wait_for_partner() -> None:
    dist.barrier()


def main(task: str, folder: str) -> None:
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(1))
    Path(folder, f"{task} {rank}").touch()
    if rank == 0:
        if task == "hangs":
            time.sleep(900)
        wait_for_partner()
    elif task in ("crashes", "hangs"):
        crash()
    elif task == "raises":
        raise ValueError("rank 1 is wrong")
    elif task == "expected":
        os._exit(3)
    else:
        wait_for_partner()
