"""Masks as models create them, from hf_qknorm and from transformers, and the keys that queries see by them."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, masking_utils

from hf_qknorm.attend.calls import is_ranges
from hf_qknorm.families.style import CACHE

CREATE: dict[str, Callable[..., Any]] = {
    "causal": masking_utils.create_causal_mask,
    "window": masking_utils.create_sliding_window_causal_mask,
    "bidirectional": masking_utils.create_bidirectional_mask,
    "bidirectional_window": masking_utils.create_bidirectional_sliding_window_mask,
    "chunked": masking_utils.create_chunked_causal_mask,
}
PADDING = {
    "none": [],
    "full": [[1] * 9, [1] * 9],
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9],
    "right": [[1] * 9, [1, 1, 1, 1, 0, 0, 0, 0, 0]],
    "both": [[0, 1, 1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0, 1]],
    "nothing": [[0] * 9, [1] * 9],
    "holes": [[1, 1, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1, 1, 1, 0]],
}


def padded(name: str) -> Tensor | None:
    """The padding of this name, None without any."""
    return torch.tensor(PADDING[name]) if PADDING[name] else None


def config(kind: str, window: int = 4, **settings: Any) -> Any:
    """A config whose masks of this kind come from hf_qknorm."""
    if kind == "chunked":
        return LlamaConfig(attention_chunk_size=window, attn_implementation="hf_qknorm", **settings)
    own = window if "window" in kind else None
    return MistralConfig(sliding_window=own, attn_implementation="hf_qknorm", num_hidden_layers=1, **settings)


def create(
    kind: str, settings: Any, length: int, padding: Tensor | None = None, cache: Any = None, **options: Any
) -> Any:
    """The mask that a model of these settings passes to its layers."""
    return CREATE[kind](settings, torch.zeros(2, length, 1), padding, **{CACHE: cache}, **options)


def transformers_own(kind: str, settings: Any, *args: Any, **options: Any) -> Tensor:
    """The boolean mask `[B, 1, T, S]` that the same call gives transformers' eager attention."""
    settings._attn_implementation = "eager"
    skip = "allow_is_bidirectional_skip"
    always = {skip: False} if skip in inspect.signature(CREATE[kind]).parameters else {}
    mask = create(kind, settings, *args, **always, **options)
    settings._attn_implementation = "hf_qknorm"
    return mask == 0


def assert_ranges(mask: Tensor, batch: int, queries: int, keys: int) -> None:
    """Fail unless the mask is ranges as `hf_qknorm.attend.calls` describes them."""
    assert is_ranges(mask)
    assert mask.shape == (batch, 1, queries, 2)
    assert int(mask.min()) >= 0
    assert int(mask.max()) <= keys
    assert mask.is_contiguous()
    assert (mask.diff(dim=2) >= 0).all()


def even(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key % 2 == 0
