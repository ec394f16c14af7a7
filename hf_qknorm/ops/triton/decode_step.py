"""A step of cached generation on the host: norm, RoPE and the write to a static cache in one launch, then attention.

Of few queries (16 at most of a group's heads) attention is one launch too. Nothing here waits for the device, reads its
numbers on the host, or keeps a tensor: a CUDA graph captures the step as it is, and each replay continues the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_qknorm.ops.triton import attention, attention_decode, norm_rope
from hf_qknorm.ops.types import Heads, Options, StaticCache, Visible


def forward(heads: Heads, cache: StaticCache, visible: Visible, options: Options) -> Tensor:
    """Attention `[B, H, T, D]` of raw queries over the cache's keys and the new ones; see `library.fused_step`."""
    q, k, v, q_norm, k_norm, rotary = heads
    keys, values, filled = cache
    count = q.shape[2]
    positions = filled if count == 1 else filled + torch.arange(count, device=filled.device)
    into = norm_rope.Cache(keys, values, v, positions)
    made = norm_rope.forward(q, k, q_norm, k_norm, rotary, cache=into)
    if attention_decode.suits(q, keys):
        zeros = made.zeros if attention_decode.counters(q, keys) else None
        return attention_decode.forward(made.q, keys, values, visible, options, zeros, filled)[0]
    filled.add_(count)
    return attention.forward(Heads(made.q, keys, values), visible, options).out
