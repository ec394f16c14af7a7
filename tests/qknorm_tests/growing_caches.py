"""Caches of one layer with some tokens, which the tests let grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_qknorm.attend.caches import room

WINDOW = 5
LAYERS: dict[str, Callable[[], Any]] = {
    "dynamic": DynamicLayer,
    "sliding": lambda: DynamicSlidingWindowLayer(WINDOW),
    "a window of one": lambda: DynamicSlidingWindowLayer(1),
}


def tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values `[2, 3, count, 4]`."""
    keys, values = torch.randn(2, 2, 3, count, 4, generator=torch.Generator().manual_seed(seed))
    return keys, values


def cache_of(layer: Any, filled: int = 7) -> DynamicCache:
    """A cache with this layer alone, and tokens in it."""
    cache = DynamicCache()
    cache.layers.append(layer)
    if filled:
        cache.update(*tokens(filled), 0)
    return cache


def append(cache: Any, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What `update` returns, with the tokens written to the layer's room."""
    keys, values = new
    into = room(cache, 0, keys)
    assert into is not None
    count = keys.shape[2]
    into.cache.keys[:, :, -count:], into.cache.values[:, :, -count:] = keys, values
    into.keep()
    return into.cache.keys, into.cache.values


def states(cache: Any) -> list[Any]:
    layer = cache.layers[0]
    return [layer.keys, layer.values, layer.get_seq_length(), getattr(layer, "cumulative_length", None)]


def assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
