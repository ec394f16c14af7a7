"""A step of cached generation on the host: norm, RoPE and the write to a cache in one launch, then attention.

Of few queries (16 at most of a group's heads) attention is one launch too. Nothing here waits for the device, reads its
numbers on the host, or keeps a tensor: a CUDA graph captures the step as it is, and each replay continues a static
cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_qknorm.ops.triton import attention, attention_decode, norm_rope
from hf_qknorm.ops.triton.architectures import MOST_ROWS
from hf_qknorm.ops.triton.plans import Growing
from hf_qknorm.ops.types import Heads, LayerCache, Options, Visible


def forward(heads: Heads, cache: LayerCache, visible: Visible, options: Options) -> Tensor:
    """Attention `[B, H, T, D]` of raw queries over the cache's keys and the new ones; see `library.fused_step`."""
    q, k, v, q_norm, k_norm, rotary = heads
    keys, values, filled = cache
    count, positions = q.shape[2], filled
    if filled is not None and count > 1:
        positions = filled + torch.arange(count, device=filled.device)
    into = norm_rope.Cache(keys, values, v, positions)
    made = norm_rope.forward(q, k, q_norm, k_norm, rotary, cache=into)
    if attention_decode.suits(q, keys):
        zeros = made.zeros if attention_decode.counters(q, keys) else None
        return attention_decode.forward(made.q, keys, values, visible, options, zeros, filled)[0]
    if filled is not None:
        filled.add_(count)
    return attention.forward(Heads(made.q, keys, values), visible, options).out


def growing_attention(values: dict[str, Any]) -> Growing | None:
    """The keys of a call of `operators.FUSED_ATTENTION`, before any check, if one plan serves many numbers of them."""
    q, k, v, plain = values["q"], values["k"], values["v"], values["q_kind"] == values["k_kind"] == "none"
    if not plain or values["cos"] is not None or values["statistics"] or values["dropout"]:
        return None
    return _growing(q, k, v, "k", "v")


def growing_step(values: dict[str, Any]) -> Growing | None:
    """The keys of a call of `operators.FUSED_STEP`, before any check, if one plan serves many numbers of them."""
    q, keys = values["q"], values["keys"]
    growing = None if values["filled"] is not None else _growing(q, keys, values["values"], "keys", "values")
    has_room = growing is not None and keys.shape[2] >= q.shape[2]  # a plan has no check of it
    return growing if has_room else None


def _growing(q: Tensor, k: Tensor, v: Tensor, keys: str, values: str) -> Growing | None:
    known = k.shape == v.shape and q.dim() == k.dim() == 4 and q.numel() and k.numel() and q.shape[1] >= k.shape[1]
    if not known:
        return None  # the operator's checks come later
    few = attention_decode.rows_of(q, k) <= MOST_ROWS
    return Growing(keys, values, attention_decode.splits(q, k)) if few else None
