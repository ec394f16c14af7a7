"""Spans of keys: for each query the first key that it sees and the one past the last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.utils import is_tracing

CHUNK = 1 << 22  # entries of a mask that are read together


class Spans(NamedTuple):
    """The keys of each query, from `start` on, before `stop`, broadcastable to `[B, T]`, if all `conditions` hold."""

    start: Tensor
    stop: Tensor
    conditions: tuple[Tensor, ...] = ()

    def __and__(self, other: Spans) -> Spans:
        """The keys in both spans."""
        start, stop = torch.maximum(self.start, other.start), torch.minimum(self.stop, other.stop)
        return Spans(start, stop, self.conditions + other.conditions)


def read(pieces: Iterable[Tensor]) -> Spans:
    """The spans of a boolean mask, from pieces of its rows `[B, 1, n, S]`."""
    bounds = []
    for seen in pieces:
        key = torch.arange(seen.shape[-1], device=seen.device, dtype=torch.int32)
        start, stop = torch.where(seen, key, seen.shape[-1]).amin(-1), torch.where(seen, key + 1, 0).amax(-1)
        bounds.append((start[:, 0], stop[:, 0], seen.sum(-1)[:, 0]))
    start, stop, count = (torch.cat(x, -1) for x in zip(*bounds, strict=True))
    if start.shape[-1] > 1 and not is_tracing(start):  # the functions of a trace let each query see its own key
        # Rows that see nothing get bounds by which no column decreases. If another one decreases, the counts differ.
        start, stop = start.flip(-1).cummin(-1).values.flip(-1), stop.cummax(-1).values
    return Spans(start, stop, (torch.where(count > 0, stop - start == count, stop <= start).all(),))
