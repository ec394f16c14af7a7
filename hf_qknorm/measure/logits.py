"""Measure the logits of one attention call: by a kernel where that suffices, else in blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.attend import cpu_kernels
from hf_qknorm.attend.calls import Structure, span, structure
from hf_qknorm.ops import library, tiled
from hf_qknorm.ops.cpu import attention as cpu_attention
from hf_qknorm.ops.trust import first_use
from hf_qknorm.ops.types import Heads, Options, Visible


def visible_keys(
    layer: nn.Module, q: Tensor, k: Tensor, mask: Any, options: dict[str, Any], real: Tensor | None
) -> Structure:
    """The keys that each real query sees; `mask` and `options` are the attention function's arguments.

    `real` `[B, T]` is False for padding, whose queries see no key; None if there is no padding.

    Raises ValueError for flex attention's block masks, which are functions.
    """
    if mask is not None and not isinstance(mask, Tensor):
        backend, kind = layer.config._attn_implementation, type(mask).__name__  # type: ignore[union-attr]
        raise ValueError(
            f'the mask of {backend} is a {kind}, which cannot be watched: set_attn_implementation("hf_qknorm") first'
        )
    padding = mask if mask is not None and mask.dim() == 2 else None  # of flash attention, causal or not by the layer
    mask = None if padding is not None else mask
    k = k.to(q.dtype)  # under autocast a cache may hold another dtype, and attention casts both
    seen = structure(layer, q, k, k, mask, options)
    if padding is not None:
        seen = _between(seen, q.shape[2], padding.bool())
    if real is None:
        return seen
    if seen.ranges is not None:
        return seen._replace(ranges=seen.ranges.where(real[..., None], 0))
    if seen.mask is None:
        return seen
    rows, mask = real[:, None, :, None], seen.mask
    mask = mask & rows if mask.dtype == torch.bool else mask.masked_fill(~rows, torch.finfo(mask.dtype).min)
    return seen._replace(mask=mask)


def measure(
    q: Tensor, seen: Structure, scale: float, softcap: float | None, cap: float
) -> tuple[tiled.HeadStatistics, Tensor]:
    """`tiled.head_statistics` of q `[B, H, T, D]`, and the entropy of uniform attention over the visible keys, in nats.

    The largest logit of a head with queries or keys that are not finite is NaN.
    """
    keys = _keys_seen(q, seen)
    even = keys.clamp_min(1).float().log().sum() / (keys > 0).sum().clamp_min(1)
    found = measure_by_kernels(q, seen, scale, softcap, cap) if q.is_cuda else None
    if found is None:
        options = Options(scale, softcap, seen.causal, seen.window)
        call = Heads(q, seen.key, seen.key), Visible(seen.ranges, mask=seen.mask), options
        in_cpp = q.device.type == "cpu" and cpu_kernels.why_not(*call, "cpu_statistics", wait=False) is None
        found = (cpu_attention if in_cpp else tiled).head_statistics(*call, cap)
    finite = [x.isfinite().all(-1).all(2).all(0) for x in (q, seen.key)]  # by head
    broken = ~(finite[0] & finite[1].repeat_interleave(len(finite[0]) // len(finite[1])))
    return found._replace(max_logit=found.max_logit.masked_fill(broken, torch.nan)), even


def measure_by_kernels(
    q: Tensor, seen: Structure, scale: float, softcap: float | None, cap: float
) -> tiled.HeadStatistics | None:
    """The same by one kernel; None for unsupported inputs, and for logits over cap/2, which kernels do not count."""
    if seen.mask is not None or scale <= 0 or library.why_not_fused(q, seen.key, seen.key) is not None:
        return None
    call = Heads(q, seen.key, seen.key), Visible(seen.ranges), Options(scale, softcap, seen.causal, seen.window)
    if first_use.why_distrusted(*call, "statistics") is not None:
        return None
    found = library.fused_statistics(*call)
    if not bool(found.largest.max() <= cap / 2):
        return None
    keys = _keys_seen(q, seen).expand(q.shape[0], 1, -1)
    entropy = found.entropy.where(keys > 0, 0.0).sum((0, 2)) / (keys > 0).sum().clamp_min(1)
    none = torch.zeros_like(entropy, dtype=torch.int64)
    return tiled.HeadStatistics(found.largest.amax((0, 2)), entropy, none + keys.sum(), none, none)


def _between(seen: Structure, queries: int, padding: Tensor) -> Structure:
    """Restrict `seen` to the keys from the first real one to the last; `padding` `[B, S]` is True for real keys."""
    key = torch.arange(padding.shape[1], device=padding.device)
    start, stop = torch.where(padding, key, len(key)).amin(-1), torch.where(padding, key + 1, 0).amax(-1)
    first, last = span(seen, queries)
    ranges = torch.stack([torch.maximum(first, start[:, None]), torch.minimum(last, stop[:, None])], -1)
    return seen._replace(ranges=ranges.to(torch.int32), causal=False, window=None)


def _keys_seen(q: Tensor, seen: Structure) -> Tensor:
    """The number of keys that each query sees, `[B or 1, H or 1, T]`."""
    if seen.mask is not None:
        mask = seen.mask if seen.mask.dtype == torch.bool else seen.mask > torch.finfo(seen.mask.dtype).min
        return mask.sum(-1).expand(-1, -1, q.shape[2])
    if seen.ranges is not None:
        start, stop = seen.ranges[:, None].clamp_max(seen.key.shape[2]).unbind(-1)
    else:
        start, stop = (x[None, None] for x in span(seen, q.shape[2]))
    return (stop - start).clamp_min(0)
