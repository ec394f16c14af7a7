"""Calls of an attention function: transformers' arguments and masks, translated for an operator.

A mask is boolean or additive `[B, 1 or H, T, S]`, or ranges: int32 `[B, 1, T, 2]`, where query t sees the keys from
ranges[b, 0, t, 0] on, before ranges[b, 0, t, 1]. Neither column decreases down the rows. A query that sees nothing has
its stop at its start or before.

A trace can't look whether padding stands between a row's tokens. It gets ranges and padding in one tensor, int32
`[B, 1, 1, 2·T + S]`: the ranges, followed by 1 for each key that is a token. `structure` then moves the tokens of each
row together, so that ranges suffice.

Nothing here imports transformers: the kernel for the Hub contains this module.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from hf_qknorm.ops.checks import check_mask
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
    module: nn.Module,
    heads: Heads,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Call:
    """The call of an operator, from the heads and the other arguments of an attention function.

    Raises ValueError for arguments that no operator takes.
    """
    heads = _in_one_dtype(heads)
    q, k, v = heads[:3]
    refuse_unsupported(kwargs)
    seen = structure(module, q, k, v, attention_mask, kwargs)
    if seen.key is not k or seen.value is not v:
        heads = heads._replace(k=seen.key, v=seen.value)
    head_dim = q.shape[-1]
    return Call(
        heads if head_dim == v.shape[-1] else _pad_to_widest(heads),
        Visible(seen.ranges, s_aux, mask=seen.mask),
        Options(head_dim**-0.5 if scaling is None else scaling, softcap, seen.causal, seen.window, dropout),
    )


def as_results(out: Tensor, value: Tensor) -> tuple[Tensor, None]:
    """An operator's output as the results of an attention function: `[B, T, H, D]`, as wide as `value`, and None."""
    width = value.shape[-1]
    out = out if out.shape[-1] == width else out[..., :width]
    return out.transpose(1, 2).contiguous(), None


def _in_one_dtype(heads: Heads) -> Heads:
    """The heads in autocast's dtype if theirs differ, as with a cache in another one: SDPA gets them so as well."""
    q, k, v = heads[:3]
    if q.dtype == k.dtype == v.dtype or not torch.is_autocast_enabled(q.device.type):
        return heads
    dtype = torch.get_autocast_dtype(q.device.type)
    return heads._replace(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype))


def _pad_to_widest(heads: Heads) -> Heads:
    """The heads in one width: zeros behind the narrower ones change neither the logits nor the output's own columns."""
    width = max(x.shape[-1] for x in heads[:3])
    q, k, v = (x if x.shape[-1] == width else nn.functional.pad(x, (0, width - x.shape[-1])) for x in heads[:3])
    return heads._replace(q=q, k=k, v=v)


def refuse_unsupported(arguments: dict[str, Any]) -> None:
    """Raise ValueError for arguments of some models' attention that would change the result."""
    for name, (kind, instead) in UNSUPPORTED.items():
        if arguments.get(name) is not None:
            raise ValueError(f"hf_qknorm attention does not support the argument {name!r} of {kind}: {instead} before")


def is_ranges(mask: Tensor) -> bool:
    """Whether a mask of four dimensions is ranges: no mask of keys is of integers."""
    return mask.dtype == torch.int32 and mask.shape[-1] == 2


def is_padded_ranges(mask: Tensor) -> bool:
    """Whether a mask of four dimensions is ranges and padding, as in a trace."""
    return mask.dtype == torch.int32 and not is_ranges(mask)


def check_keys(mask: Tensor, keys: int) -> None:
    """Raise ValueError for ranges that were made for another number of keys than a layer has."""
    expected = keys if torch.compiler.is_compiling() else vars(mask).get(KEYS, keys)
    if expected != keys:
        raise ValueError(
            f"the attention mask is for {expected} keys, and a layer has {keys}. Gradient checkpointing takes the "
            "cache from layers, and with it the prefix of PEFT's prefix tuning: switch it off, or train another kind "
            "of adapter, and without a cache"
        )


class Structure(NamedTuple):
    """Keys and values, and which of them each query sees: by a mask, by ranges `[B, T, 2]`, or by causality and window.

    `order` `[B, S]` is the original index of each reordered key; None without a new order.
    """

    key: Tensor
    value: Tensor
    mask: Tensor | None
    ranges: Tensor | None
    causal: bool
    window: int | None
    order: Tensor | None = None


def structure(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, arguments: dict[str, Any]
) -> Structure:
    """Apply transformers' conventions to a call of an attention function.

    It reads `sliding_window` and `is_causal` of the keyword `arguments`, and `cu_seq_lens_q` `[N + 1]`, the ends of
    packed sequences in the flattened batch. A `position_bias` `[B or 1, H or 1, T or 1, S]`, which is added to the
    logits, becomes part of the mask.
    """
    window, is_causal, boundaries = map(arguments.get, ("sliding_window", "is_causal", "cu_seq_lens_q"))
    queries, keys = query.shape[2], key.shape[2]
    tokens = None
    if mask is not None and mask.dtype == torch.int32:
        _check_ranges(mask, (*query.shape[:3], keys))
        if not hasattr(module, "scheme"):  # a patched layer may attend to a part of a static cache, and checks before
            check_keys(mask, keys)
    if mask is not None and is_padded_ranges(mask):
        mask, tokens = mask[..., : 2 * queries].reshape(-1, 1, queries, 2), mask[:, 0, 0, 2 * queries :]
    if mask is not None and is_ranges(mask):  # these include causality, window and padding
        seen = Structure(key, value, None, mask[:, 0], False, None)
    elif mask is not None:
        seen = Structure(key, value, mask, None, False, None)
    else:
        causal = _is_causal(module) if is_causal is None else bool(is_causal)
        if causal and 1 < queries < keys:  # a static cache's first call: the rest of it is empty
            key, value = key[:, :, :queries], value[:, :, :queries]
        # Causal with one query too: a window looks back only. The window of an unpatched layer is in its masks.
        seen = Structure(key, value, None, None, causal, window if hasattr(module, "scheme") else None)
    seen = seen if boundaries is None else _within_sequences(seen, query, boundaries)
    if arguments.get("position_bias") is not None:
        return _biased(seen, queries, None if tokens is None else tokens[:, :keys], arguments["position_bias"])
    return seen if tokens is None else _without_gaps(seen, tokens[:, :keys])


def _check_ranges(mask: Tensor, full: tuple[int, int, int, int]) -> None:
    """Raise ValueError for a mask in int32 of another form than ranges, with or without padding."""
    *_, queries, keys = full
    rows, width = (queries, 2) if is_ranges(mask) else (1, 2 * queries + keys)
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != rows or mask.shape[3] < width:
        check_mask(mask, full)  # refuses its dtype


def _is_causal(module: nn.Module) -> bool:
    """Whether module and config both say so: sdpa reads the module alone, unlike some models' eager attention."""
    if not getattr(module, "is_causal", True):
        return False
    config = getattr(module, "config", None)
    own = getattr(config, "__dict__", {})  # an attribute that a config lacks takes as long as a small operator
    return bool(own["is_causal"] if "is_causal" in own else getattr(type(config), "is_causal", True))


def span(seen: Structure, queries: int) -> tuple[Tensor, Tensor]:
    """The first and last + 1 of the keys that each query sees through causality and window, `[T]`."""
    keys, window = seen.key.shape[2], seen.window
    own = torch.arange(queries, device=seen.key.device) + keys - queries
    stop = own + 1 if seen.causal else torch.full_like(own, keys) if window is None else own + window + 1
    start = torch.zeros_like(own) if window is None else own - window + (1 if seen.causal else 0)
    return start.clamp(0, keys), stop.clamp(0, keys)


def _biased(seen: Structure, queries: int, tokens: Tensor | None, bias: Tensor) -> Structure:
    """An additive mask: the bias of the logits for each key that a query sees, else the least number of its dtype."""
    keys, mask = seen.key.shape[2], seen.mask
    place, bias = torch.arange(keys, device=bias.device), bias[..., :keys]
    if mask is None:
        start, stop = span(seen, queries) if seen.ranges is None else seen.ranges[:, None].unbind(-1)
        visible = (place >= start[..., None]) & (place < stop[..., None])
    elif mask.dtype == torch.bool:
        visible = mask
    else:
        visible = mask > torch.finfo(mask.dtype).min
        bias = bias + mask.masked_fill(~visible, 0.0)
    visible = visible if tokens is None else visible & tokens[:, None, None].bool()
    mask = torch.where(visible, bias, torch.finfo(bias.dtype).min)
    return Structure(seen.key, seen.value, mask.expand(-1, -1, queries, -1), None, False, None)


def _without_gaps(seen: Structure, tokens: Tensor) -> Structure:
    """Move the keys that are tokens (1 in `tokens` `[B, S]`) in front of the others, in their order.

    So each query still sees a range of keys.
    """
    assert seen.ranges is not None
    order = (1 - tokens).argsort(dim=-1, stable=True)
    before = nn.functional.pad(tokens.cumsum(-1), (1, 0))
    places = seen.ranges.flatten(1).clamp_max(tokens.shape[1]).long()
    ranges = before.gather(-1, places).view(seen.ranges.shape).to(torch.int32)
    index = order[:, None, :, None]  # take_along_dim would fix the length of a traced graph
    key, value = (x.gather(2, index.expand(*x.shape[:2], -1, x.shape[3])) for x in (seen.key, seen.value))
    return seen._replace(key=key, value=value, ranges=ranges, order=order)


def _within_sequences(seen: Structure, query: Tensor, boundaries: Tensor) -> Structure:
    """Hide the other packed sequences from each query."""
    batch, length = query.shape[0], query.shape[2]
    if length != seen.key.shape[2]:
        raise ValueError("hf_qknorm attention takes cu_seq_lens_q for whole sequences only, not with a filled cache")
    place = torch.arange(batch * length, device=query.device)
    ends = boundaries.to(place)
    sequence = torch.searchsorted(ends, place, right=True).view(batch, length)
    if seen.mask is not None:
        same, mask = sequence[:, None, :, None] == sequence[:, None, None, :], seen.mask
        mask = mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, torch.finfo(mask.dtype).min)
        return seen._replace(mask=mask)
    ends = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), batch * length)])
    row = length * torch.arange(batch, device=query.device)[:, None]
    start, stop = ((end - row).clamp(0, length) for end in (ends[sequence], ends[sequence + 1]))
    if seen.ranges is not None:
        start, stop = torch.maximum(start, seen.ranges[..., 0]), torch.minimum(stop, seen.ranges[..., 1])
    first, last = span(seen, length)
    ranges = torch.stack([torch.maximum(start, first), torch.minimum(stop, last)], -1)
    return seen._replace(ranges=ranges.to(torch.int32), causal=False, window=None)
