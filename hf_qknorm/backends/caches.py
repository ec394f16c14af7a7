"""transformers' caches: static ones, which a kernel can write to by itself, and empty ones, which change nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

FAITHFUL = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


def static_layer(cache: Any, index: int, keys: Tensor) -> StaticLayer | None:
    """The cache's layer, if it is a plain static one, filled already, on the device and in the dtype of `keys`."""
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    if layer is None or type(layer) is not StaticLayer or not layer.is_initialized:
        return None
    offloaded: bool = getattr(cache, "offloading", False)
    fits = layer.keys.device == keys.device and layer.keys.dtype == keys.dtype
    return layer if fits and not offloaded else None


def next_positions(layer: StaticLayer, count: int) -> Tensor:
    """Where the next `count` keys go, `[T]`."""
    filled: Tensor = layer.cumulative_length
    return torch.arange(count, device=filled.device) + filled


def count_written(layer: StaticLayer, count: int) -> None:
    """Let the layer count so many more keys as there, as its own `update` does."""
    layer.cumulative_length.add_(count)  # in place: compiled graphs know its address


def is_empty(cache: Any, index: int) -> bool:
    """Whether a layer of the cache is known to hold no keys yet, so that new ones are all that its queries see.

    Only of transformers' own layers that give back what they are given, and without waiting for a GPU: a static layer
    is empty until its first keys make it.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        return False
    if index >= len(layers):
        return getattr(cache, "layer_class_to_replicate", None) in FAITHFUL
    layer = layers[index]
    return type(layer) in FAITHFUL and (not layer.is_initialized or not layer.keys.numel())
