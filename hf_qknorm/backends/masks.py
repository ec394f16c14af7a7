"""The keys that each query sees, from transformers' masks: as ranges where those suffice, else as a T×S mask.

Ranges are int32 `[B, 1, T, 2]`: query t sees the keys from ranges[b, 0, t, 0] on, before ranges[b, 0, t, 1]. Neither
column decreases down the rows. A query that sees nothing has its stop at its start or before.

A trace can't look whether padding stands between a row's tokens. It gets ranges and padding in one tensor, int32
`[B, 1, 1, 2·T + S]`: the ranges, followed by 1 for each key that is a token. `structure` then moves the tokens of each
row together, so that ranges suffice.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.utils import is_tracing

from hf_qknorm.backends.spans import MaskFunction, known, read
from hf_qknorm.families import FAMILIES

CHUNK = 1 << 22  # entries of a mask that are read together
# The code of transformers' mask functions without gaps between a query's keys, and of their conjunction: a trace goes
# by a function's code.
WITHOUT_GAPS = (
    masking_utils.causal_mask_function.__code__,
    masking_utils.bidirectional_mask_function.__code__,
    masking_utils.and_masks(masking_utils.causal_mask_function).__code__,
)
# Whether the windows of transformers' masks are those of the layers; a trace can't check it by itself.
WINDOWS_KNOWN = all(
    known(window(2), torch.arange(4)) is not None
    for window in (
        masking_utils.sliding_window_causal_mask_function,
        masking_utils.sliding_window_bidirectional_mask_function,
    )
)
GAPS = (
    "hf_qknorm under torch.compile expects mask functions by which each query sees keys without a gap, before padding. "
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
    """Ranges, or ranges and padding, or a boolean mask `[B, 1, T, S]`, or None where causality and window suffice.

    transformers passes a window as `local_size` so that a mask is built for it. Where the layers pass the same window
    to their attention function, a batch without padding needs no mask.
    """
    own = torch.arange(q_length, device=device) + q_offset - kv_offset  # the key at each query's own position
    traced = is_tracing(own)
    if _layers_pass(local_size, config) and (WINDOWS_KNOWN if traced else known(mask_function, torch.arange(1))):
        local_size = None
    build = partial(masking_utils.sdpa_mask, batch_size, kv_length=kv_length, kv_offset=kv_offset, device=device)
    whole = {"q_length": q_length, "q_offset": q_offset, "attention_mask": attention_mask, "local_size": local_size}
    # Whether a mask is needed does not depend on the function: with this one, the answer costs no T×S tensor.
    if build(**whole, **kwargs, mask_function=lambda batch, head, query, key: key >= 0) is None:
        return None

    def rows(first: int, count: int) -> Tensor:
        """The mask of `count` queries `[B, 1, count, S]`, before padding."""
        part = {"q_length": count, "q_offset": q_offset + first, "allow_is_causal_skip": False}
        return build(**part, mask_function=mask_function, use_vmap=use_vmap)

    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, torch.arange(kv_length, device=device) + kv_offset].bool()
    if traced:
        contiguous = not use_vmap and any(mask_function.__code__ is code for code in WITHOUT_GAPS)
        spans = read([rows(0, q_length)]) if contiguous else None  # a compiler fuses the rows with what reads them
        if spans is not None:
            torch._assert_async(torch.stack(spans.conditions).all(), GAPS)
    else:
        spans = None if use_vmap else known(mask_function, own)
        if spans is None:
            step = max(CHUNK // (batch_size * kv_length), 1)
            spans = read(rows(first, min(step, q_length - first)) for first in range(0, q_length, step))
        spans = spans if padding is None else spans & read([padding[:, None, None]])
        if spans.conditions and not torch.stack(spans.conditions).all():  # waits for the device, once
            spans = None
    if spans is None:
        return build(**whole, **kwargs, mask_function=mask_function, use_vmap=use_vmap)
    ranges = torch.stack([x.clamp(0, kv_length).expand(batch_size, q_length) for x in spans[:2]], -1)
    if traced and padding is not None:
        ranges = torch.cat([ranges.flatten(1), padding.expand(batch_size, -1)], -1)[:, None]
    return ranges[:, None].to(torch.int32)


def _layers_pass(window: int | None, config: Any) -> bool:
    """Whether the layers of this config's model pass this window to their attention function, as patched ones do."""
    family = FAMILIES.get(getattr(config, "base_model_type", ""))
    if window is None or family is None or not family.has_window:
        return False
    chunked = getattr(config, "attention_chunk_size", None) is not None  # then the size may be that of the chunks
    return not chunked and window == getattr(config, "sliding_window", None)


def is_ranges(mask: Tensor) -> bool:
    """Whether a mask of four dimensions is ranges: no mask of keys is of integers."""
    return mask.dtype == torch.int32 and mask.shape[-1] == 2


def is_padded_ranges(mask: Tensor) -> bool:
    """Whether a mask of four dimensions is ranges and padding, as in a trace."""
    return mask.dtype == torch.int32 and not is_ranges(mask)


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
    packed sequences in the flattened batch.
    """
    window, is_causal, boundaries = map(arguments.get, ("sliding_window", "is_causal", "cu_seq_lens_q"))
    queries, keys = query.shape[2], key.shape[2]
    tokens = None
    if mask is not None and is_padded_ranges(mask):
        mask, tokens = mask[..., : 2 * queries].reshape(-1, 1, queries, 2), mask[:, 0, 0, 2 * queries :]
    if mask is not None and is_ranges(mask):  # these include causality, window and padding
        seen = Structure(key, value, None, mask[:, 0].clamp_max(keys), False, None)
    elif mask is not None:
        seen = Structure(key, value, mask[..., :keys], None, False, None)
    else:
        if is_causal is None:  # both say so: sdpa reads the module alone, unlike some models' eager attention
            is_causal = all(getattr(x, "is_causal", True) for x in (module, getattr(module, "config", None)))
        causal = bool(is_causal)
        if causal and 1 < queries < keys:  # a static cache's first call: the rest of it is empty
            key, value = key[:, :, :queries], value[:, :, :queries]
        # Causal with one query too: a window looks back only. The window of an unpatched layer is in its masks.
        seen = Structure(key, value, None, None, causal, window if hasattr(module, "scheme") else None)
    seen = seen if boundaries is None else _within_sequences(seen, query, boundaries)
    return seen if tokens is None else _without_gaps(seen, tokens[:, :keys])


def _without_gaps(seen: Structure, tokens: Tensor) -> Structure:
    """Move the keys that are tokens (1 in `tokens` `[B, S]`) in front of the others, in their order.

    So each query still sees a range of keys.
    """
    assert seen.ranges is not None
    order = (1 - tokens).argsort(dim=-1, stable=True)
    before = nn.functional.pad(tokens.cumsum(-1), (1, 0))
    ranges = before.gather(-1, seen.ranges.flatten(1).long()).view(seen.ranges.shape).to(torch.int32)
    key, value = (x.take_along_dim(order[:, None, :, None], 2) for x in (seen.key, seen.value))
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
