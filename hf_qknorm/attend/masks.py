"""The mask function registered with transformers: ranges of keys where those suffice, else a T×S mask; see `calls`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.utils import is_tracing

from hf_qknorm.attend.calls import KEYS
from hf_qknorm.attend.mask_functions import MaskFunction, Spans, known, read

CHUNK = 1 << 22  # entries of a mask that are read together

# The code of transformers' mask functions without gaps between a query's keys, and of their conjunction: a trace goes
# by a function's code.
WITHOUT_GAPS = (
    masking_utils.causal_mask_function.__code__,
    masking_utils.bidirectional_mask_function.__code__,
    masking_utils.and_masks(masking_utils.causal_mask_function).__code__,
)
# Whether transformers' masks have the windows of the layers; a trace can't check it by itself.
WINDOWS_KNOWN = all(
    known(window(2), torch.arange(4)) is not None
    for window in (
        masking_utils.sliding_window_causal_mask_function,
        masking_utils.sliding_window_bidirectional_mask_function,
    )
)
COMPUTES_WITH_MASKS = ("doge",)  # before its layers call the attention function
GAPS = (
    "hf_qknorm under torch.compile expects masks by which each query sees keys without a gap: no padding between the "
    "tokens of a row. Pass other masks as a boolean attention_mask [B, 1, T, S]"
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
    """Ranges, or a boolean mask `[B, 1, T, S]`, or None where causality and window suffice.

    For a model that computes with its masks it is the additive mask of eager attention.

    transformers passes a window as `local_size` so that a mask is built for it. Where the layers pass the same window
    to their attention function, a batch without padding needs no mask. Layers that run the model's own forward may not
    say that they are causal, without SDPA: several queries of theirs always get a mask.
    """
    sizes = {"kv_length": kv_length, "kv_offset": kv_offset, "device": device}
    whole = {"q_length": q_length, "q_offset": q_offset, "attention_mask": attention_mask}
    how = {"mask_function": mask_function, "use_vmap": use_vmap}
    model_type = getattr(config, "base_model_type", getattr(config, "model_type", ""))
    if model_type in COMPUTES_WITH_MASKS:
        return masking_utils.eager_mask(batch_size, **sizes, **whole, **how, **kwargs)
    if getattr(config, "runs_own_forward", True) and q_length > 1:
        kwargs["allow_is_causal_skip"] = False
    kwargs["local_size"] = None if _layers_pass(local_size, mask_function, config) else local_size
    build = partial(masking_utils.sdpa_mask, batch_size, **sizes)
    # Whether a mask is needed does not depend on the function: with this one, the answer costs no T×S tensor.
    if build(**whole, **kwargs, mask_function=lambda batch, head, query, key: key >= 0) is None:
        return None

    def rows(first: int, count: int) -> Tensor:
        """The mask of `count` queries `[B, 1, count, S]`, before padding."""
        return build(q_length=count, q_offset=q_offset + first, allow_is_causal_skip=False, **how)

    own = torch.arange(q_length, device=device) + q_offset - kv_offset  # the key at each query's own position
    spans = _spans(None if use_vmap else mask_function, own, q_length, rows, batch_size * kv_length)
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if spans is not None and padding is not None:
        spans = spans & read([padding[:, torch.arange(kv_length, device=device) + kv_offset].bool()[:, None, None]])
    ranges = None if spans is None else _ranges(spans, batch_size, q_length, kv_length)
    return build(**whole, **kwargs, **how) if ranges is None else ranges


def _ranges(spans: Spans, batch: int, queries: int, keys: int) -> Tensor | None:
    """Spans as a mask of ranges; None if the conditions do not hold, for which a trace asserts that they do."""
    if spans.conditions:
        hold = torch.stack(spans.conditions).all()
        if is_tracing(hold):
            torch._assert_async(hold, GAPS)
        elif not hold:  # waits for the device, once
            return None
    mask = torch.stack([x.clamp(0, keys).expand(batch, queries) for x in spans[:2]], -1)[:, None].to(torch.int32)
    if not is_tracing(mask):
        vars(mask)[KEYS] = keys
    return mask


def _spans(
    function: MaskFunction | None, own: Tensor, queries: int, rows: Callable[[int, int], Tensor], size: int
) -> Spans | None:
    """The keys that queries see by transformers' mask function; None where a trace can't exclude gaps between them.

    `function` is None for one of the user's own. `own` is the key at each query's own position. `rows` gives the mask
    of some queries; each takes `size` numbers. `queries` may be symbolic in a trace, where len(own) is not.
    """
    if is_tracing(own):  # a compiler fuses all rows with what reads them
        contiguous = function is not None and any(function.__code__ is code for code in WITHOUT_GAPS)
        return read([rows(0, queries)]) if contiguous else None
    spans = None if function is None else known(function, own)
    if spans is None:
        step = max(CHUNK // size, 1)
        spans = read(rows(first, min(step, queries - first)) for first in range(0, queries, step))
    return spans


def _layers_pass(window: int | None, function: MaskFunction, config: Any) -> bool:
    """Whether the layers of this config's model pass the function's window to their attention function too."""
    if window is None or not getattr(config, "passes_window", False):
        return False
    chunked = getattr(config, "attention_chunk_size", None) is not None  # then it may be the chunks' size
    if chunked or window != getattr(config, "sliding_window", None):
        return False
    key = torch.arange(1)
    return WINDOWS_KNOWN if is_tracing(key) else known(function, key) is not None
