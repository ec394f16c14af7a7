"""Attention by PyTorch's FlexAttention, compiled: for GPUs that the kernels do not serve.

The keys that each query sees are always one range. So are the blocks of keys that a block of queries sees, and those
that all of its queries see whole: no T×S mask is needed to find them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.ops.checks import why_not_ranges
from hf_qknorm.ops.types import DTYPES, Heads, Options, Visible

BLOCK = 128  # queries and keys of a block of FlexAttention's mask
GRAPHS = 64  # of different layers and calls, before torch raises an error
LEAST_QUERIES = BLOCK  # with fewer, as in generation, each new length could compile a kernel anew


def why_not(heads: Heads, visible: Visible, options: Options) -> str | None:
    """The reason why FlexAttention can't take a call after norm and rotation, or None if it can."""
    q = heads.q
    if visible.mask is not None:
        return why_not_ranges(visible)
    if options.dropout > 0:
        return "FlexAttention has no dropout"
    if q.dtype not in DTYPES:
        return f"FlexAttention computes in fp32, bf16 and fp16, got {q.dtype}"
    if not 16 <= q.shape[-1] <= 256:
        return f"FlexAttention takes a head_dim of 16 to 256 here, got {q.shape[-1]}"
    if 0 in (*q.shape, *heads.k.shape):
        return f"there is nothing to attend: q {list(q.shape)}, k {list(heads.k.shape)}"
    if torch.compiler.is_compiling():
        return "a compiled model would need FlexAttention's block mask in its graph"
    if q.shape[2] < LEAST_QUERIES:
        return f"FlexAttention takes calls of at least {LEAST_QUERIES} queries here, got {q.shape[2]}"
    return _why_not_here(q.device, q.dtype)


@cache
def _why_not_here(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"FlexAttention has no backward on {device}"
    if find_spec("triton") is None:
        return "Triton is not installed, which FlexAttention needs"
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "torch.compile is switched off, without which FlexAttention holds every logit in memory"
    if torch.version.hip is None and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] < 8:
        return f"{device} has no bf16"
    return None


def attention(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """`library.attention` by FlexAttention: `[B, H, T, D]`, for calls that `why_not` takes."""
    return _attend(_compiled(), heads, visible, options)


def checked_attention(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """`attention`, compiled apart from it: the sizes of checks do not make the sizes of later calls dynamic.

    torch keeps graphs by a function's code, so that the two compiled functions need a body each.
    """
    return _attend(_compiled_for_checks(), heads, visible, options)


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(lambda *arguments, **options: flex_attention(*arguments, **options), fullgraph=True)


@cache
def _compiled_for_checks() -> Callable[..., Any]:  # torch keeps graphs by code: this needs its own
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(lambda *arguments, **options: flex_attention(*arguments, **options), fullgraph=True)


def _attend(flex_attention: Callable[..., Any], heads: Heads, visible: Visible, options: Options) -> Tensor:
    """Cap and mask as functions of a logit, the sinks from the log-sum-exp of the others."""
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v = heads[:3]
    own_scale, sinks = q.shape[-1] ** -0.5, visible.sinks
    if options.scale != own_scale:  # FlexAttention compiles a kernel for each scale, which may differ between layers
        q = q * (options.scale / own_scale)
    mask = block_mask(*spans(heads, visible, options), k.shape[2])
    with torch._dynamo.config.patch(recompile_limit=GRAPHS):
        found = flex_attention(
            q,
            k,
            v,
            score_mod=None if options.softcap is None else cap(options.softcap),
            block_mask=mask,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=None if sinks is None else AuxRequest(lse=True),
        )
    if sinks is None:
        return found
    out, (lse, _) = found
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])  # of the keys beside the sink
    return (out * share[..., None]).to(out.dtype)


def cap(softcap: float) -> Callable[..., Tensor]:
    """softcap·tanh(score / softcap), as a function of a score and its place."""
    return lambda score, *place: softcap * torch.tanh(score / softcap)


def spans(heads: Heads, visible: Visible, options: Options) -> tuple[Tensor, Tensor]:
    """The first key that each query sees, and the one after its last, `[B or 1, T]` each, in int32."""
    queries, keys, window = heads.q.shape[2], heads.k.shape[2], options.window
    own = torch.arange(keys - queries, keys, dtype=torch.int32, device=heads.q.device)[None]
    start, stop = torch.zeros_like(own), own + 1 if options.causal else torch.full_like(own, keys)
    if window is not None:
        start = own - window + (1 if options.causal else 0)
        stop = stop if options.causal else own + window + 1
    if visible.ranges is not None:
        first, last = visible.ranges.unbind(-1)
        start, stop = torch.maximum(start, first), torch.minimum(stop, last)
    return start.clamp(0, keys), stop.clamp(0, keys)


def block_mask(start: Tensor, stop: Tensor, keys: int) -> Any:
    """FlexAttention's mask for queries that see keys from `start` on, before `stop`: `[B or 1, T]`, non-decreasing."""
    from torch.nn.attention.flex_attention import BlockMask

    batch, queries = start.shape
    blocks = math.ceil(queries / BLOCK)
    top = torch.arange(blocks, device=start.device) * BLOCK
    bottom = (top + BLOCK - 1).clamp_max(queries - 1)
    first = torch.arange(math.ceil(keys / BLOCK), device=start.device) * BLOCK
    after = first + BLOCK
    touched = (start[:, top, None] < after) & (stop[:, bottom, None] > first)
    whole = (start[:, bottom, None] <= first) & (stop[:, top, None] >= after)
    alone = batch == 1

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = b * 0 if alone else b
        return (key >= start[row, query]) & (key < stop[row, query])

    return BlockMask.from_kv_blocks(
        *_ordered(touched & ~whole), *_ordered(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(queries, keys)
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks in each row of `[B, queries, keys]`, and their indices, before the indices of the others."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1)[:, None].to(torch.int32), order[:, None].to(torch.int32)
