"""The checks of the arguments that every attention operator takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hf_qknorm.ops.types import Heads, Options, Visible


def check_call(heads: Heads, visible: Visible, options: Options) -> None:
    """Raise ValueError unless these are the arguments of one attention call."""
    check_heads(heads.q, heads.k, heads.v)
    _check_visible(heads, visible)
    _check_options(options)


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless shapes and dtypes of q, k and v fit."""
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(
            f"expected q [B, H, T, D] and k, v [B, Hk, S, D], got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    (batch, heads, _, head_dim), (batch_kv, heads_kv, _, head_dim_kv) = q.shape, k.shape
    if batch != batch_kv or head_dim != head_dim_kv or heads % max(heads_kv, 1):
        raise ValueError(
            f"q {list(q.shape)} and k {list(k.shape)} do not fit: batch and head_dim must be equal, and the query "
            "heads a multiple of the key heads"
        )
    if 0 in (heads, heads_kv, head_dim):
        raise ValueError(f"expected at least one head and one column, got q {list(q.shape)} and k {list(k.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}: cast q and k to v's")


def _check_visible(heads: Heads, visible: Visible) -> None:
    """Raise ValueError unless mask, ranges and sinks fit the heads."""
    (batch, count, length, _), (ranges, sinks, _, mask) = heads.q.shape, visible
    if mask is not None:
        check_mask(mask, (batch, count, length, heads.k.shape[2]))
    if ranges is not None and (
        ranges.dim() != 3 or ranges.shape[0] not in (1, batch) or ranges.shape[1:] != (length, 2)
    ):
        raise ValueError(
            f"ranges must be the first key and the one past the last of each query, [B or 1, T, 2] with B = {batch} "
            f"and T = {length}, got {list(ranges.shape)}"
        )
    if ranges is not None and ranges.dtype != torch.int32:
        raise ValueError(f"ranges must be int32, got {ranges.dtype}")
    if sinks is not None and sinks.shape != (count,):
        raise ValueError(f"sinks must be one logit a query head, [{count}], got {list(sinks.shape)}")


def check_mask(mask: Tensor, full: tuple[int, int, int, int]) -> None:
    """Raise ValueError unless the mask broadcasts to `[B, H, T, S]`, the sizes in `full`."""
    if mask.dim() != 4 or any(m not in (1, n) for m, n in zip(mask.shape, full, strict=True)):
        raise ValueError(f"the mask must broadcast to [B, H, T, S] = {list(full)}, got {list(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"the mask must be boolean (True: may attend) or of floating point (added to the logits), got {mask.dtype}"
        )


def why_not_ranges(visible: Visible) -> str | None:
    """The reason why an implementation that takes ranges of keys alone can't take a call, or None."""
    if visible.mask is None:
        return None
    return f"the mask {list(visible.mask.shape)} is an arbitrary one, and not a range of keys for each query"


def _check_options(options: Options) -> None:
    """Raise ValueError, naming the field, for one out of its range."""
    scale, softcap, causal, window, dropout = options
    if not 0 < scale < math.inf:  # false for NaN
        raise ValueError(f"scale must be finite and greater than 0, got {scale}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be finite and greater than 0, got {softcap}: pass None for no cap")
    if window is not None and window < int(causal):
        least = "1 with causal (the query's own key alone)" if causal else "0 (the query's own key alone)"
        raise ValueError(f"window must be at least {least}, got {window}: pass None for no window")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")


def refuse_forward_mode(arguments: Iterable[Any]) -> None:
    """Raise NotImplementedError if a tensor carries a tangent: operators have no forward mode and would drop it."""
    if forward_ad._current_level < 0:  # not in forward mode; torch.compile can't trace the rest
        return
    unpack = forward_ad.unpack_dual
    if any(isinstance(x, Tensor) and unpack(x).tangent is not None for x in arguments):  # type: ignore[no-untyped-call]
        raise NotImplementedError(
            "hf_qknorm attention has no forward-mode derivative (torch.func.jvp, torch.func.jacfwd): use "
            'eager attention, such as attn_implementation="hf_qknorm_eager" or hf_qknorm.ops.reference.attention'
        )
