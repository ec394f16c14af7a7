"""transformers' static caches, which a kernel can write to by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer


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
    """Where the next `count` keys go, `[T]`; the layer counts them as there, as its own `update` does."""
    filled: Tensor = layer.cumulative_length
    positions = torch.arange(count, device=filled.device) + filled
    filled.add_(count)  # in place: compiled graphs know its address
    return positions
