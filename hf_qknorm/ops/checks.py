"""What every attention operator asks of its arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ranges: Tensor | None,
    sinks: Tensor | None,
    dropout: float,
) -> None:
    """Raise ValueError, naming what does not fit, unless these are the arguments of one attention call."""
    refuse_forward_mode(q, k, v, mask, sinks)
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(
            f"expected q [B, H, T, D] and k, v [B, Hk, S, D], got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % max(k.shape[1], 1):
        raise ValueError(
            f"q {list(q.shape)} and k {list(k.shape)} do not fit: batch and head_dim must be equal, and the query "
            "heads a multiple of the key heads"
        )
    if 0 in (q.shape[1], k.shape[1], q.shape[3]):
        raise ValueError(f"expected at least one head and one column, got q {list(q.shape)} and k {list(k.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}: cast q and k to v's")
    full = (*q.shape[:3], k.shape[2])
    if mask is not None and (mask.dim() != 4 or any(m not in (1, n) for m, n in zip(mask.shape, full, strict=True))):
        raise ValueError(f"the mask must broadcast to [B, H, T, S] = {list(full)}, got {list(mask.shape)}")
    if mask is not None and mask.requires_grad:
        raise ValueError(
            "the mask requires a gradient, which this attention does not compute: detach it, or use "
            'attn_implementation="hf_qknorm_eager"'
        )
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"the mask must be boolean (True: may attend) or of floating point (added to the logits), got {mask.dtype}"
        )
    if ranges is not None:
        _check_ranges(q, ranges)
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must be one logit a query head, [{q.shape[1]}], got {list(sinks.shape)}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")


def check_rules(scale: float | None, softcap: float | None, causal: bool, window: int | None) -> None:
    """Raise ValueError, naming the argument, unless these say how logits become weights."""
    if scale is not None and not -math.inf < scale < math.inf:  # false for NaN; dynamo knows no math.isfinite
        raise ValueError(f"scale must be finite, got {scale}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be finite and greater than 0, got {softcap}: pass None for no cap")
    if window is not None and window < int(causal):
        reach = "1 with causal (the query's own key alone)" if causal else "0 (the query's own key alone)"
        raise ValueError(f"window must be at least {reach}, got {window}: pass None for no window")


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError if a tensor carries a tangent, which an operator without a forward mode would lose."""
    if forward_ad._current_level < 0:  # not in forward mode: a graph that is compiled has nothing of this
        return
    unpack = forward_ad.unpack_dual
    if any(x is not None and unpack(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        raise NotImplementedError(
            "hf_qknorm attention has no forward-mode derivative (torch.func.jvp, torch.func.jacfwd): use "
            'attn_implementation="hf_qknorm_eager", or hf_qknorm.ops.reference.attention'
        )


def _check_ranges(q: Tensor, ranges: Tensor) -> None:
    batch, length = q.shape[0], q.shape[2]
    if ranges.dim() != 3 or ranges.shape[0] not in (1, batch) or ranges.shape[1:] != (length, 2):
        raise ValueError(
            f"ranges must be the first key and the one past the last of each query, [B or 1, T, 2] with B = {batch} "
            f"and T = {length}, got {list(ranges.shape)}"
        )
    if ranges.dtype != torch.int32:
        raise ValueError(f"ranges must be int32, got {ranges.dtype}")
