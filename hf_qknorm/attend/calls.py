"""Calls of an attention function: transformers' arguments and masks as one `Call`.

A mask is boolean or additive `[B, 1 or H, T, S]`, or ranges: int32 `[B, 1, T, 2]`, where query t sees the keys from
ranges[b, 0, t, 0] on, before ranges[b, 0, t, 1]. Neither column decreases down the rows. A query that sees nothing has
its stop at its start or before.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from hf_qknorm.ops.checks import check_call, check_mask
from hf_qknorm.ops.types import Call, Heads, Options, Visible

KEYS: Final = "qk_norm_keys"  # the attribute of ranges that holds S, which their shape does not

# Arguments that change a result: for each its purpose, and what to do instead.
_EAGER: Final = "call set_attn_implementation('eager')"
_PAGED: Final = (
    "a paged cache for continuous batching",
    "call generate, or without a cap set_attn_implementation('sdpa')",
)
UNSUPPORTED: Final = {
    "cache": _PAGED,  # in transformers before 5.24
    "block_table": _PAGED,
    "indices": ("sparse attention", _EAGER),  # the keys that a query sees; a patched model's layers have a mask of them
    "block_indices": ("sparse attention", _EAGER),
    "sinks": ("sinks that differ between queries", _EAGER),
}


def make_call(
    module: Any,
    heads: Heads,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> Call:
    """The call of an implementation, from the heads and the other arguments of an attention function.

    `cu_seq_lens_q` `[N + 1]` are the ends of packed sequences in the flattened batch. A `position_bias`
    `[B or 1, H or 1, T or 1, S]` is added to the logits, and becomes part of the mask. The cap of a patched layer that
    runs the model's own forward is the layer's.

    Raises ValueError for arguments that no implementation takes, or that do not fit.
    """
    for name, (purpose, instead) in UNSUPPORTED.items():
        if others.get(name) is not None:
            raise ValueError(f"hf_qknorm does not support the argument {name!r} of {purpose}: {instead} before")
    if not heads.q.dtype == heads.k.dtype == heads.v.dtype:
        heads = _in_one_dtype(heads)
    q, k, v, *_ = heads
    patched = hasattr(module, "scheme")
    if patched and module.runs_own_forward:
        patched, softcap = False, module.softcap
    causal, window, ranges, mask = False, None, None, None
    if attention_mask is None:
        # Causal with one query too: a window looks back only. The window of an unpatched layer is in its masks.
        causal = _is_causal(module) if is_causal is None else bool(is_causal)
        window = sliding_window if patched else None
        if causal and 1 < q.shape[2] < k.shape[2]:  # a static cache's first call: the rest of it is empty
            heads = heads._replace(k=k[:, :, : q.shape[2]], v=v[:, :, : q.shape[2]])
    elif is_ranges(attention_mask):  # these include causality, window and padding
        _check_ranges(attention_mask, (*q.shape[:3], k.shape[2]))
        if not patched:  # a patched layer may attend to a part of a static cache, and checks before
            check_keys(attention_mask, k.shape[2])
        ranges = attention_mask[:, 0]
    else:
        mask = attention_mask
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    call = Call(heads, Visible(ranges, s_aux, mask=mask), Options(scale, softcap, causal, window, dropout))
    if cu_seq_lens_q is not None:
        call = _within_sequences(call, cu_seq_lens_q)
    if position_bias is not None:
        call = _biased(call, position_bias)
    call = call if q.shape[-1] == v.shape[-1] else call._replace(heads=_pad_to_widest(call.heads))
    check_call(*call)
    return call


def as_results(out: Tensor, value: Tensor) -> tuple[Tensor, None]:
    """An operator's output as the results of an attention function: `[B, T, H, D]`, as wide as `value`, and None."""
    width = value.shape[-1]
    out = out if out.shape[-1] == width else out[..., :width]
    return out.transpose(1, 2).contiguous(), None


def is_ranges(mask: Tensor) -> bool:
    """Whether a mask is ranges: no mask of keys is of integers."""
    return mask.dtype == torch.int32


def check_keys(mask: Tensor, keys: int) -> None:
    """Raise ValueError for ranges that were made for another number of keys than a layer has."""
    expected = keys if torch.compiler.is_compiling() else vars(mask).get(KEYS, keys)
    if expected != keys:
        raise ValueError(
            f"the attention mask is for {expected} keys, and a layer has {keys}. Gradient checkpointing takes the "
            "cache from layers, and with it the prefix of PEFT's prefix tuning: switch it off, or train another kind "
            "of adapter, and without a cache"
        )


def span(call: Call) -> tuple[Tensor, Tensor]:
    """The first and last + 1 of the keys that each query sees through causality and window, `[T]`."""
    queries, keys, (_, _, causal, window, _) = call.heads.q.shape[2], call.heads.k.shape[2], call.options
    own = torch.arange(queries, device=call.heads.q.device) + keys - queries
    stop = own + 1 if causal else torch.full_like(own, keys) if window is None else own + window + 1
    start = torch.zeros_like(own) if window is None else own - window + (1 if causal else 0)
    return start.clamp(0, keys), stop.clamp(0, keys)


def with_ranges(call: Call, start: Tensor, stop: Tensor) -> Call:
    """The call in which each query sees the keys from `start` to `stop`, `[B, T]`, as far as it saw them before."""
    first, last = span(call) if call.visible.ranges is None else call.visible.ranges.unbind(-1)
    ranges = torch.stack([torch.maximum(first, start), torch.minimum(last, stop)], -1).to(torch.int32)
    visible, options = call.visible._replace(ranges=ranges), call.options._replace(causal=False, window=None)
    return call._replace(visible=visible, options=options)


def _in_one_dtype(heads: Heads) -> Heads:
    """Heads that differ, as with a cache in another dtype, in autocast's: SDPA gets them so as well."""
    q, k, v = heads[:3]
    if not torch.is_autocast_enabled(q.device.type):
        return heads
    dtype = torch.get_autocast_dtype(q.device.type)
    return heads._replace(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype))


def _pad_to_widest(heads: Heads) -> Heads:
    """The heads in one width: zeros behind the narrower ones change neither the logits nor the output's own columns."""
    width = max(x.shape[-1] for x in heads[:3])
    q, k, v = (x if x.shape[-1] == width else nn.functional.pad(x, (0, width - x.shape[-1])) for x in heads[:3])
    return heads._replace(q=q, k=k, v=v)


def _check_ranges(mask: Tensor, full: tuple[int, int, int, int]) -> None:
    """Raise ValueError for a mask in int32 of another form than ranges."""
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2:] != (full[2], 2):
        check_mask(mask, full)  # refuses its dtype


def _is_causal(module: nn.Module) -> bool:
    """Whether module and config both say so: sdpa reads the module alone, unlike some models' eager attention."""
    if not getattr(module, "is_causal", True):
        return False
    if (config := getattr(module, "config", None)) is None:
        return True
    own = object.__getattribute__(config, "__dict__")  # a config's own search takes as long as a small operator
    return bool(own["is_causal"] if "is_causal" in own else getattr(type(config), "is_causal", True))


def _biased(call: Call, bias: Tensor) -> Call:
    """The call with an additive mask: the bias for each key that a query sees, else the least number of its dtype."""
    (ranges, sinks, seed, mask), keys = call.visible, call.heads.k.shape[2]
    place, bias = torch.arange(keys, device=bias.device), bias[..., :keys]
    if mask is None:
        start, stop = span(call) if ranges is None else ranges[:, None].unbind(-1)
        visible = (place >= start[..., None]) & (place < stop[..., None])
    elif mask.dtype == torch.bool:
        visible = mask
    else:
        visible = mask > torch.finfo(mask.dtype).min
        bias = bias + mask.masked_fill(~visible, 0.0)
    mask = torch.where(visible, bias, torch.finfo(bias.dtype).min).expand(-1, -1, call.heads.q.shape[2], -1)
    return Call(call.heads, Visible(None, sinks, seed, mask), call.options._replace(causal=False, window=None))


def _within_sequences(call: Call, boundaries: Tensor) -> Call:
    """The call without the other packed sequences."""
    (batch, _, length, _), mask = call.heads.q.shape, call.visible.mask
    if length != call.heads.k.shape[2]:
        raise ValueError("hf_qknorm attention takes cu_seq_lens_q for whole sequences only, not with a filled cache")
    place = torch.arange(batch * length, device=call.heads.q.device)
    ends = boundaries.to(place)
    sequence = torch.searchsorted(ends, place, right=True).view(batch, length)
    if mask is not None:
        same = sequence[:, None, :, None] == sequence[:, None, None, :]
        mask = mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, torch.finfo(mask.dtype).min)
        return call._replace(visible=call.visible._replace(mask=mask))
    ends = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), batch * length)])
    row = length * torch.arange(batch, device=place.device)[:, None]
    return with_ranges(call, *((end - row).clamp(0, length) for end in (ends[sequence], ends[sequence + 1])))
