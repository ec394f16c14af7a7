"""Sequences of batches, put together anew: in batches of another size, and held out to judge by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor


def regrouped(batches: Sequence[Mapping[str, Tensor]], most: int) -> list[dict[str, Tensor]]:
    """The sequences of the batches in the same order, up to `most` in a batch.

    Sequences that differ in their inputs or their shapes are not put into one batch.
    """
    found: list[dict[str, Tensor]] = []
    for _, run in groupby(batches, key=lambda batch: sorted((key, x.shape[1:]) for key, x in batch.items())):
        alike = list(run)
        parts = {key: torch.split(torch.cat([batch[key] for batch in alike]), most) for key in alike[0]}
        found += [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    return found


def divided(
    batches: Sequence[Mapping[str, Tensor]], least: int = 1, most: int | None = None
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The sequences of batches but an eighth, and this eighth, evenly spread.

    The eighth has at least `least` sequences, if as many are left, and at most `most`.
    """
    rows = [{key: x[i : i + 1] for key, x in batch.items()} for batch in batches for i in range(_rows(batch))]
    count = max(len(rows) // 8, min(least, len(rows) // 2), 1)
    step = -(-len(rows) // min(count, most or count))
    size = max(map(_rows, batches))
    return regrouped([row for i, row in enumerate(rows) if i % step], size), regrouped(rows[::step], size)


def _rows(batch: Mapping[str, Tensor]) -> int:
    """The number of a batch's sequences or images."""
    return len(next(iter(batch.values())))
