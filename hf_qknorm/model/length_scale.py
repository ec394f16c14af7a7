"""The length scale: queries multiplied by log n / log L, n the number of keys that a query sees."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def length_factors(positions: Tensor, length: int, window: int | None) -> Tensor:
    """log n / log L of queries at `positions`, in fp32; n = position + 1, and L = `length`.

    A window limits n and L, L to 2 at least. The factor of a query that sees one key, at position 0 or in a window of
    1, is 0: a single key has all of the attention in any case.
    Positions of padding may be negative, and count as 0.
    """
    seen = (positions + 1).clamp(1, window)
    return seen.float().log() / math.log(max(min(length, window or length), 2))


def largest_factor(longest: int, length: int, window: int | None) -> float:
    """The factor at the last of `longest` positions."""
    return float(length_factors(torch.tensor(longest - 1), length, window))


def scaled_queries(
    q: Tensor, positions: Tensor | None, length: int, window: int | None, blend: Tensor | None
) -> Tensor:
    """Multiply q `[B, H, T, D]` by its `length_factors`; positions `[1 or B, T]`.

    A `blend` b during a blend of the norms makes the factor f 1 + b·(f − 1). Raises ValueError for other positions.
    """
    if positions is None or positions.dim() != 2:
        got = None if positions is None else list(positions.shape)
        raise ValueError(
            f"length_scale needs position_ids [B, T] in every attention layer, got {got}: call the model, not its "
            "layers, or pass position_ids to them"
        )
    factors = length_factors(positions, length, window)[:, None, :, None]
    if blend is not None:
        factors = 1 + blend * (factors - 1)
    return (q * factors.to(q.device)).to(q.dtype)
