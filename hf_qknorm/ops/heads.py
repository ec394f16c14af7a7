"""What is done to the heads before attention, as the fused operators take it: a norm and a rotation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """A norm over head_dim, as `reference.head_norm` has it; kind "none" leaves its input alone.

    `gain` and `bias` are `[D]`, `[H, D]` or `[1]`; `blend` is a number, as a tensor. `eps` is a number, as a tensor
    where the norm has a knee: kernels then read it from memory, and one graph serves every value.
    """

    kind: str = "none"
    gain: Tensor | None = None
    bias: Tensor | None = None
    blend: Tensor | None = None
    eps: float | Tensor = 1e-6
    p: float = 2.0

    @property
    def eps_parts(self) -> tuple[Tensor | None, float]:
        """`eps` as operators and kernels take it: a tensor, or else a number."""
        return (self.eps, 0.0) if isinstance(self.eps, Tensor) else (None, self.eps)


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
