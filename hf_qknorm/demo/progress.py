"""The demo's progress bar, with the time left of the whole demo, and its estimate at the start."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from hf_qknorm.files.progress import progress_bar

FORMAT = "{desc}: {percentage:3.0f}%|{bar:30}| {elapsed} so far, about {remaining} left"


class Progress:
    """A bar over the whole demo; `print` prints above it, `close` removes it.

    Its unit is the work of training on one token.
    """

    def __init__(self, total: int) -> None:
        options: dict[str, Any] = {"bar_format": FORMAT, "mininterval": 1, "smoothing": 0.02}
        self.bar = progress_bar(total=total, desc="starting", **options)
        self.close = self.bar.close

    def stage(self, name: str) -> None:
        """Name the current stage beside the bar."""
        self.bar.set_description_str(name)

    def advance(self, work: int) -> None:
        """Advance by this much work, in trained tokens."""
        self.bar.update(work)

    def print(self, text: str) -> None:
        """Print text above the bar, at once even into a pipe."""
        with tqdm.external_write_mode():
            print(text, flush=True)


def evaluation_work(tokens: int) -> int:
    """The work of an evaluation of so many tokens, as a number of trained tokens."""
    return tokens // 2


def seconds_per_token(model: Any, batch: Tensor) -> float:
    """The seconds of a forward and backward pass per token of `batch` `[B, T]`; weights and gradients stay as before.

    The fastest of three passes counts: the first allocates memory, and other programs may slow one down.
    """
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        seconds.append(time.perf_counter() - start)
        model.zero_grad()
    return min(seconds) / batch.numel()


def format_seconds(seconds: float) -> str:
    """Format a duration, rounded up to ten seconds, as in "2 min 30 s"."""
    tens = -(-int(seconds) // 10) * 10 or 10
    minutes, rest = divmod(tens, 60)
    return " ".join(part for part in (f"{minutes} min" * bool(minutes), f"{rest} s" * bool(rest)) if part)


def threads() -> str:
    """The number of threads that torch computes with."""
    count = torch.get_num_threads()
    return f"{count} thread" + "s" * (count > 1)
