"""Which keys each query may see: what transformers says, as ranges wherever those say it all, else as a T×S mask.

Ranges are int32 `[B, 1, T, 2]`: query t sees the keys from ranges[b, 0, t, 0] on, before ranges[b, 0, t, 1]. Neither
column decreases down the rows. A query that sees nothing has its stop at its start or before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, reduce
from operator import and_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.utils import is_tracing

MaskFunction = Callable[[Any, Any, Any, Any], Tensor]

CHUNK = 1 << 22  # entries of a mask that are looked at together
HOLES = (
    "hf_qknorm under torch.compile expects each query to see keys without a gap, so no padding between a row's tokens. "
    "Pass other masks as a boolean attention_mask [B, 1, T, S]"
)


def structured_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Ranges, or a boolean mask `[B, 1, T, S]`, or None where causality and the layer's own window say all.

    transformers passes a window as `local_size` so that a mask is built for it. The attention functions here get
    the same window from the layer (`sliding_window`), so that a batch without padding needs no mask.
    """
    chunked = getattr(config, "attention_chunk_size", None) is not None
    if not chunked and local_size is not None and local_size == getattr(config, "sliding_window", None):
        local_size = None
    build = partial(masking_utils.sdpa_mask, batch_size, kv_length=kv_length, kv_offset=kv_offset, device=device)
    whole = {"q_length": q_length, "q_offset": q_offset, "attention_mask": attention_mask, "local_size": local_size}
    # Whether sdpa needs a mask does not depend on the function: with this one, the answer costs no T×S tensor.
    if build(**whole, **kwargs, mask_function=_everything) is None:
        return None
    own = torch.arange(q_length, device=device) + q_offset - kv_offset  # the key at each query's own place
    traced = is_tracing(own)

    def rows(first: int, number: int) -> Tensor:
        part = {"q_length": number, "q_offset": q_offset + first, "allow_is_causal_skip": False}
        return build(**part, mask_function=mask_function, use_vmap=use_vmap)

    spans = None if traced or use_vmap else _known(mask_function, own)  # dynamo reads no closures
    if spans is None and not traced:
        step = max(CHUNK // (batch_size * kv_length), 1)
        spans = _read(rows(first, min(step, q_length - first)) for first in range(0, q_length, step))
    elif spans is None and not use_vmap:
        spans = _read([rows(0, q_length)])  # a compiler fuses these rows into what is read from them
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if spans is not None and padding is not None:
        spans = spans & _read([padding[:, None, None, torch.arange(kv_length, device=device) + kv_offset]])
    if spans is None or not _holds(spans, traced):  # a function of the user's own in a trace, or holes
        return build(**whole, **kwargs, mask_function=mask_function, use_vmap=use_vmap)
    ranges = torch.stack([x.clamp(0, kv_length).expand(batch_size, q_length) for x in spans[:2]], -1)
    return ranges[:, None].to(torch.int32)


def is_ranges(mask: Tensor) -> bool:
    """Whether a mask of four dimensions is ranges: no mask of keys is of integers."""
    return mask.dtype == torch.int32 and mask.shape[-1] == 2


class Spans(NamedTuple):
    """The keys of each query, from `start` on, before `stop`, broadcastable to `[B, T]`, if all `conditions` hold."""

    start: Tensor
    stop: Tensor
    conditions: tuple[Tensor, ...] = ()

    def __and__(self, other: Spans) -> Spans:
        """What both see."""
        start, stop = torch.maximum(self.start, other.start), torch.minimum(self.stop, other.stop)
        return Spans(start, stop, self.conditions + other.conditions)


def _everything(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key >= 0


def _known(function: MaskFunction, own: Tensor) -> Spans | None:
    """The spans of transformers' own functions of causality, windows and packing, in closed form; None for others."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    made: Any = function  # most are closures: who made them and what they captured says all
    captured = {
        name: x.cell_contents for name, x in zip(made.__code__.co_freevars, made.__closure__ or (), strict=True)
    }
    everything = Spans(torch.zeros_like(own), torch.full_like(own, torch.iinfo(torch.int32).max))
    match made.__qualname__.partition(".")[0], captured:
        case "bidirectional_mask_function", _:
            return everything
        case "causal_mask_function", _:
            return everything._replace(stop=own + 1)
        case "sliding_window_overlay", {"sliding_window": window}:
            return everything._replace(start=own - window + 1)
        case "sliding_window_bidirectional_overlay", {"sliding_window": window}:
            return Spans(own - window, own + window + 1)
        case "and_masks", {"mask_functions": functions}:
            parts = [_known(f, own) for f in functions]
            known = [part for part in parts if part is not None]
            return reduce(and_, known) if len(known) == len(parts) else None
        case "packed_sequence_mask_function", {"packed_sequence_mask": ids} if ids.shape[-1] == len(own):
            start, stop = (torch.searchsorted(ids, ids, right=right) for right in (False, True))
            return Spans(start, stop, ((ids.diff() >= 0).all(),))
        case "remap_positions_for_packed_sequence", {"mask_function": inner}:
            return _known(inner, own)  # within a sequence its positions count up as the keys do; the ids say which
    return None


def _read(pieces: Iterable[Tensor]) -> Spans:
    """The spans of a boolean mask that comes as its rows, `[B, 1, n, S]` at a time."""
    bounds = []
    for seen in pieces:
        key = torch.arange(seen.shape[-1], device=seen.device, dtype=torch.int32)
        start, stop = torch.where(seen, key, seen.shape[-1]).amin(-1), torch.where(seen, key + 1, 0).amax(-1)
        bounds.append((start[:, 0], stop[:, 0], seen.sum(-1)[:, 0]))
    start, stop, count = (torch.cat(x, -1) for x in zip(*bounds, strict=True))
    # Rows that see nothing get what keeps the columns from decreasing; where they decrease, the counts do not fit.
    start, stop = start.flip(-1).cummin(-1).values.flip(-1), stop.cummax(-1).values
    return Spans(start, stop, (torch.where(count > 0, stop - start == count, stop <= start).all(),))


def _holds(spans: Spans, traced: bool) -> bool:
    """Whether the spans say all; reading that waits for the device once. A trace goes on, and asserts it."""
    if not spans.conditions:
        return True
    holds = torch.stack(spans.conditions).all()
    if traced:
        torch._assert_async(holds, HOLES)
        return True
    return bool(holds)


class Structure(NamedTuple):
    """Which keys each query may see: a mask, or ranges `[B, T, 2]`, or else causality and window; keys cut to these."""

    key: Tensor
    value: Tensor
    mask: Tensor | None
    ranges: Tensor | None
    causal: bool
    window: int | None


def structure(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    window: int | None,
    is_causal: bool | None = None,
    boundaries: Tensor | None = None,
) -> Structure:
    """transformers' conventions for a call of an attention function, spelt out for the ops.

    `boundaries` `[N + 1]` are the ends of packed sequences in the flattened batch (`cu_seq_lens_q`).
    """
    queries, keys = query.shape[2], key.shape[2]
    if mask is not None and is_ranges(mask):  # they hold causality, window and padding, as a mask does
        seen = Structure(key, value, None, mask[:, 0].clamp_max(keys), False, None)
    elif mask is not None:
        seen = Structure(key, value, mask[..., :keys], None, False, None)
    else:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and 1 < queries < keys:  # a static cache's first call: what lies beyond the queries is still empty
            key, value = key[:, :, :queries], value[:, :, :queries]
        seen = Structure(key, value, None, None, causal, window)  # causal with one query too: a window looks back only
    return seen if boundaries is None else _within_sequences(seen, query, boundaries)


def _within_sequences(seen: Structure, query: Tensor, boundaries: Tensor) -> Structure:
    """Keep packed sequences apart: `boundaries` `[N + 1]` are their ends in the flattened batch."""
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
    own = place[:length]
    ends = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), batch * length)])
    first = length * torch.arange(batch, device=query.device)[:, None]
    start, stop = ((end - first).clamp(0, length) for end in (ends[sequence], ends[sequence + 1]))
    if seen.ranges is not None:
        start, stop = torch.maximum(start, seen.ranges[..., 0]), torch.minimum(stop, seen.ranges[..., 1])
    if seen.causal:
        stop = torch.minimum(stop, own + 1)
    if seen.window is not None:
        start = torch.maximum(start, own - seen.window + (1 if seen.causal else 0))
        stop = stop if seen.causal else torch.minimum(stop, own + seen.window + 1)
    return seen._replace(ranges=torch.stack([start, stop], -1).to(torch.int32), causal=False, window=None)
