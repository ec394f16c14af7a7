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
    batches: Sequence[Mapping[str, Tensor]], least: int = 1, most: int | None = None, tokens: int = 0
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The sequences of batches but an eighth, and this eighth, evenly spread.

    The eighth has at least `least` sequences and `tokens` tokens, but at most half of the sequences, and `most`.
    """
    rows = [{key: x[i : i + 1] for key, x in batch.items()} for batch in batches for i in range(_rows(batch))]
    least = max(least, -(-tokens * len(rows) // sum(map(token_count, rows))))
    count = max(len(rows) // 8, min(least, len(rows) // 2), 1)
    count = min(count, most or count)
    judging = {i * len(rows) // count for i in range(count)}
    size = max(map(_rows, batches))
    others, judged = ([row for i, row in enumerate(rows) if (i in judging) is part] for part in (False, True))
    return regrouped(others, size), regrouped(judged, size)


def _rows(batch: Mapping[str, Tensor]) -> int:
    """The number of a batch's sequences or images."""
    return len(next(iter(batch.values())))


def token_count(batch: Mapping[str, Tensor]) -> int:
    """The number of a batch's tokens, padding included; of images, their own number."""
    return batch["input_ids"].numel() if "input_ids" in batch else len(batch["pixel_values"])
