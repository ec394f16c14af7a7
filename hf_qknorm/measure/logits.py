"""Measure the logits of one attention call: by a kernel where that suffices, else in blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.attend.calls import make_call, span, with_ranges
from hf_qknorm.model.passes import sees
from hf_qknorm.ops import library, tiled
from hf_qknorm.ops.cpu import attention as cpu_attention
from hf_qknorm.ops.types import Call, Heads


def call_to_measure(
    layer: nn.Module, q: Tensor, k: Tensor, mask: Any, options: dict[str, Any], real: Tensor | None
) -> Call:
    """The call in which each real query sees its keys; `mask` and `options` are the attention function's arguments.

    Keys stand for the values, which are not read. `real` `[B, T]` is False for padding, whose queries see no key; None
    if there is no padding.

    Raises ValueError for flex attention's block masks, which are functions.
    """
    if mask is not None and not isinstance(mask, Tensor):
        backend, kind = layer.config._attn_implementation, type(mask).__name__  # type: ignore[union-attr]
        raise ValueError(
            f'the mask of {backend} is a {kind}, which cannot be watched: set_attn_implementation("hf_qknorm") first'
        )
    padding = mask if mask is not None and mask.dim() == 2 else None  # of flash attention, causal or not by the layer
    k = k.to(q.dtype)  # under autocast a cache may hold another dtype, and attention casts both
    options = options | {"dropout": 0.0, "s_aux": None}
    call = make_call(layer, Heads(q, k, k), mask if padding is None else None, **options)
    if padding is not None:  # from the first real key to the last
        key = torch.arange(padding.shape[1], device=padding.device)
        start = torch.where(padding.bool(), key, len(key)).amin(-1)
        call = with_ranges(call, start[:, None], torch.where(padding.bool(), key + 1, 0).amax(-1)[:, None])
    ranges, _, _, mask = call.visible
    if real is not None and ranges is not None:
        ranges = ranges.where(real[..., None], 0)
    if real is not None and mask is not None:
        rows = real[:, None, :, None]
        mask = mask & rows if mask.dtype == torch.bool else mask.masked_fill(~rows, torch.finfo(mask.dtype).min)
    return call._replace(visible=call.visible._replace(ranges=ranges, mask=mask))


def measure(call: Call, cap: float) -> tuple[tiled.HeadStatistics, Tensor]:
    """`tiled.head_statistics` of a call, and the entropy of uniform attention over the visible keys, in nats.

    The largest logit of a head with queries or keys that are not finite is NaN.
    """
    q, k, *_ = call.heads
    keys = _keys_seen(call)
    even = keys.clamp_min(1).float().log().sum() / (keys > 0).sum().clamp_min(1)
    found = measure_by_kernels(call, cap) if q.is_cuda else None
    if found is None:
        with torch.no_grad():  # which does not wait for a compiler
            in_cpp = q.device.type == "cpu" and cpu_attention.why_not(call) is None
        found = (cpu_attention if in_cpp else tiled).head_statistics(*call, cap)
    finite = [x.isfinite().all(-1).all(2).all(0) for x in (q, k)]  # by head
    broken = ~(finite[0] & finite[1].repeat_interleave(len(finite[0]) // len(finite[1])))
    return found._replace(max_logit=found.max_logit.masked_fill(broken, torch.nan)), even


def measure_by_kernels(call: Call, cap: float) -> tiled.HeadStatistics | None:
    """The same by one kernel; None for unsupported inputs, and for logits over cap/2, which kernels do not count."""
    if call.visible.mask is not None or library.why_not_fused(call.heads) is not None:
        return None
    found = library.fused_statistics(*call)
    if not bool(found.largest.max() <= cap / 2):
        return None
    keys = _keys_seen(call).expand(len(call.heads.q), 1, -1)
    entropy = found.entropy.where(keys > 0, 0.0).sum((0, 2)) / (keys > 0).sum().clamp_min(1)
    none = torch.zeros_like(entropy, dtype=torch.int64)
    return tiled.HeadStatistics(found.largest.amax((0, 2)), entropy, none + keys.sum(), none, none)


def _keys_seen(call: Call) -> Tensor:
    """The number of keys that each query sees, `[B or 1, H or 1, T]`."""
    ranges, _, _, mask = call.visible
    if mask is not None:
        return sees(mask).sum(-1).expand(-1, -1, call.heads.q.shape[2])
    if ranges is not None:
        start, stop = ranges[:, None].clamp_max(call.heads.k.shape[2]).unbind(-1)
    else:
        start, stop = (x[None, None] for x in span(call))
    return (stop - start).clamp_min(0)
