"""The arguments of every attention operator: heads with their norms and rotation, visible keys, options."""

from __future__ import annotations

from dataclasses import dataclass
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


class Heads(NamedTuple):
    """Queries, keys and values `[B, H or Hk, T or S, D]` as a call gets them, and what is to be done to q and k."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_norm: Norm = Norm()
    k_norm: Norm = Norm()
    rotary: Rotary | None = None

    @property
    def raw(self) -> bool:
        """Whether something is to be done to q or k."""
        return self.rotary is not None or self.q_norm.kind != "none" or self.k_norm.kind != "none"


class Visible(NamedTuple):
    """What hides keys, weights beside causality and window: ranges `[B, T, 2]`, sinks `[H]`, a dropout seed `[1]`."""

    ranges: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, ranges: Tensor | None, sinks: Tensor | None, seed: Tensor | None) -> Visible:
        """As kernels read them: ranges of every row of the batch, and no gaps."""
        ranges = None if ranges is None else ranges.expand(len(q), -1, -1).contiguous()
        return cls(ranges, None if sinks is None else sinks.contiguous(), seed)


@dataclass(frozen=True)
class Options:
    """How logits become weights; the meaning of each is that of `reference.attention`."""

    scale: float
    softcap: float | None = None
    causal: bool = False
    window: int | None = None
    dropout: float = 0.0


def laid_out(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Empty heads like x `[B, H, T, D]`, laid out as `[B, T, H, D]`."""
    b, h, t, d = x.shape
    return x.new_empty((b, t, h, d), dtype=dtype).transpose(1, 2)
