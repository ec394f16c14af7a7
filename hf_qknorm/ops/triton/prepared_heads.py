"""Heads as the attention kernels take them: normed and rotated, with the factors that make logits of their products."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hf_qknorm.ops.triton import norm_rope
from hf_qknorm.ops.triton.launch import dense, units
from hf_qknorm.ops.types import Heads, Options


class PreparedHeads(NamedTuple):
    """q, k, v after norm and RoPE, and the largest norms of q and k `[B, Hk, 2]` if one of these was applied.

    A score is q·k, times `unit` if `scaled`; `cap` makes logits of scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bound: Tensor | None
    unit: float
    cap: float
    scaled: bool

    @classmethod
    def of(cls, heads: Heads, options: Options) -> PreparedHeads:
        v = dense(heads.v)
        unit, cap, scaled = units(options.scale, options.softcap)
        if not heads.raw:
            return cls(dense(heads.q), dense(heads.k), v, None, unit, cap, scaled)
        before, after = (unit, cap) if scaled else (cap, 1.0)
        q, k, _, q_norm, k_norm, rotary = heads
        normed = norm_rope.forward(q, k, q_norm, k_norm, rotary, before, bounded=True)
        assert normed.k is not None
        return cls(normed.q, normed.k, v, normed.bound, 1.0, after, False)
