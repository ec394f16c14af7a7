"""Masks as models create them, from hf_qknorm and from transformers, and the keys that queries see by them."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, masking_utils

from hf_qknorm.attend.calls import is_ranges, make_call
from hf_qknorm.families.style import CACHE
from hf_qknorm.ops import reference
from hf_qknorm.ops.types import Heads
from qknorm_tests.tables import dense

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


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4, 5, 0, 1]])


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
    hidden = torch.zeros(2, length, 1)
    return CREATE[kind](settings, hidden, padding, **{CACHE: cache}, **options)


def transformers_own(kind: str, settings: Any, *args: Any, **options: Any) -> Tensor:
    """The boolean mask `[B, 1, T, S]` that the same call gives transformers' eager attention."""
    settings._attn_implementation = "eager"
    skip = "allow_is_bidirectional_skip"
    always = {skip: False} if skip in inspect.signature(CREATE[kind]).parameters else {}
    mask = create(kind, settings, *args, **always, **options)
    settings._attn_implementation = "hf_qknorm"
    return mask == 0


def visible_keys(mask: Tensor | None, expected: Tensor, causal: bool, window: int | None) -> Tensor:
    """Whether each query sees each key, `[B, 1, T, S]`, in a layer of this causality and window with the mask."""
    batch, _, queries, keys = expected.shape
    q, k = torch.zeros(batch, 1, queries, 1), torch.zeros(batch, 1, keys, 1)
    module: Any = SimpleNamespace(scheme="none", is_causal=causal, runs_own_forward=False)
    heads, seen, options = make_call(module, Heads(q, k, k), mask, sliding_window=window)
    kept = heads.k.shape[2]
    visible = reference.visible(queries, kept, options.causal, options.window).expand(batch, 1, -1, -1)
    if seen.ranges is not None:
        visible = visible & dense(seen.ranges, kept)
    visible = visible if seen.mask is None else visible & seen.mask
    return torch.nn.functional.pad(visible, (0, keys - kept))


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
