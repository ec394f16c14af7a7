"""What is done to the heads before attention, as the fused operators take it: a norm and a rotation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """A norm over head_dim, as `reference.head_norm` has it; kind "none" leaves its input alone.

    `gain` and `bias` are `[D]`, `[H, D]` or `[1]`; `blend` is a number, as a tensor, and so is `knee`,
    which takes the place of `eps`.
    """

    kind: str = "none"
    gain: Tensor | None = None
    bias: Tensor | None = None
    blend: Tensor | None = None
    knee: Tensor | None = None
    eps: float = 1e-6
    p: float = 2.0


class Rotary(NamedTuple):
    """The rotation of the first R columns of each head: cos and sin `[B or 1, T, R/2]`, one angle a pair of columns.

    A pair is (i, i + R/2), or (2i, 2i + 1) if `interleaved`. Views of any strides will do.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


def laid_out(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Empty heads like x `[B, H, T, D]`, laid out as `[B, T, H, D]`."""
    b, h, t, d = x.shape
    return x.new_empty((b, t, h, d), dtype=dtype).transpose(1, 2)
