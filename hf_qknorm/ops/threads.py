"""Functions side by side in the threads of torch's own OpenMP runtime, each with torch's operators in one thread.

A step of torch that uses several threads waits for all of them. With many small steps, one thread that another program
keeps from its core stalls them all. Here the threads wait for each other once, at the end. Threads of Python would
compete for the cores with the runtime's, which look for work in a loop for milliseconds after each step of torch.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

import torch

MOST_THREADS: Final = 4  # more would wait for Python's interpreter lock between the steps


def count() -> int:
    """The number of functions that `run` computes at once: torch's number of threads, or 1 if that is too many."""
    threads = torch.get_num_threads()
    return threads if threads <= MOST_THREADS and _parallel_region() is not None else 1


def run(functions: Sequence[Callable[[], Any]], device: torch.device) -> None:
    """Call each of the functions once, in no fixed order and in any thread. Raises what the first that fails raises.

    They see the caller's inference mode, no gradient mode where there are several, and no autocast for the device.
    """
    region, threads = _parallel_region(), min(count(), len(functions))
    if region is None or threads < 2:
        with _no_autocast(device):
            for function in functions:
                function()
        return
    inference = torch.is_inference_mode_enabled()
    waiting, failures = deque(functions), deque[BaseException]()

    def work(_: Any) -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad(), _no_autocast(device):
                while (function := _taken(waiting)) is not None:
                    function()
        except BaseException as error:  # an interrupt, too: nothing can be raised through the runtime
            failures.append(error)
            waiting.clear()

    region(_Body(work), None, threads, 0)
    if failures:
        raise failures[0]


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Keeps autocast from computing products of fp32 in half precision."""
    able = torch.amp.is_autocast_available(device.type)
    on = able and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def _taken(waiting: deque[Callable[[], Any]]) -> Callable[[], Any] | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _parallel_region() -> Callable[..., None] | None:
    """The runtime's entry that calls a function in each of its threads; None where torch has no such runtime.

    GCC's, LLVM's and Intel's runtimes have it on Linux. torch on macOS and Windows has others.
    """
    try:
        region: Any = ctypes.CDLL(torch._C.__file__).GOMP_parallel  # of the runtime that torch is linked with
    except (OSError, AttributeError):
        return None
    region.argtypes, region.restype = (_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return region
