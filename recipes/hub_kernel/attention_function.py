"""Attention with a tanh cap on its logits, for models of transformers: `attn_implementation="org/qknorm-attention"`.

transformers loads a kernel with `flash_attn_forward` and `supports_flash_attn` as an attention function, and gives it
the masks of SDPA. Built from hf_qknorm's sources.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.attend.calls import as_results, make_call
from hf_qknorm.attend.spans import CHUNK, read
from hf_qknorm.ops import library
from hf_qknorm.ops.checks import why_not_ranges
from hf_qknorm.ops.types import Heads

__all__ = ["flash_attn_forward", "supports_flash_attn"]

logger = logging.getLogger(__name__)

supports_flash_attn = True  # transformers looks for the name


def flash_attn_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(softcap·tanh(scaling·q·kᵀ / softcap) + mask)·v, in memory linear in the length; differentiable.

    query `[B, H, T, D]`, key and value `[B, Hk, S, D]`, H a multiple of Hk. `attention_mask` is boolean (True: may
    attend) or additive, broadcastable to `[B, H, T, S]`; None is causal, if the module is and T > 1. A `softcap` of
    None is `attn_logit_softcapping` of the module's config; if that is None or absent, logits are not capped.

    Options: `scaling` (1/√D), `dropout` (0), `s_aux` (a sink for each head, `[H]`), `cu_seq_lens_q` (the ends of packed
    sequences). `sliding_window` is ignored, as SDPA ignores it: transformers puts windows in masks.

    Returns the output `[B, T, H, D]`, and None for the weights. Raises ValueError for arguments that don't fit or are
    not supported.
    """
    if kwargs.get("output_attentions"):
        raise ValueError(
            'output_attentions=True needs attention weights, which are never formed: use "eager" attention'
        )
    if softcap is None:
        softcap = getattr(getattr(module, "config", None), "attn_logit_softcapping", None)
    mask, attention = attention_mask, library.fused_attention
    reason = library.why_not_fused(query, key, value)
    if reason is None and mask is not None:
        mask = _as_ranges(mask, query.shape[2])
    call = make_call(module, Heads(query, key, value), mask, softcap=softcap, **kwargs)
    reason = reason or why_not_ranges(call.visible)
    if reason is not None:
        attention = library.attention
        if query.is_cuda and not torch.compiler.is_compiling():
            _warn_once(reason)
    return as_results(attention(*call), value)


def _as_ranges(mask: Tensor, queries: int) -> Tensor:
    """Ranges of keys, for a boolean mask `[B or 1, 1, T, S]` without gaps between a query's keys; else the mask itself.

    It waits for the device. A trace can't, and keeps the mask.
    """
    if mask.dtype != torch.bool or mask.shape[1:3] != (1, queries) or torch.compiler.is_compiling():
        return mask
    batch, _, _, keys = mask.shape
    spans = read(mask.split(max(CHUNK // (batch * max(keys, 1)), 1), 2))
    if not torch.stack(spans.conditions).all():
        return mask
    return torch.stack([x.clamp(0, keys) for x in spans[:2]], -1)[:, None].to(torch.int32)


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("capped attention runs in PyTorch, a block of queries at a time, and not in its kernels: %s", reason)
