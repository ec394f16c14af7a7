"""transformers' caches: static layers, which a kernel can write to, and empty ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from hf_qknorm.ops.types import StaticCache

PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


def static_layer(cache: Any, index: int, keys: Tensor) -> StaticCache | None:
    """A layer of the cache if it is a plain static one, allocated, on the device and in the dtype of `keys`; else None.

    Operators add to its number of keys in place, as compiled graphs expect.
    """
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    if layer is None or type(layer) is not StaticLayer or not layer.is_initialized:
        return None
    offloaded: bool = getattr(cache, "offloading", False)
    fits = layer.keys.device == keys.device and layer.keys.dtype == keys.dtype
    return StaticCache(layer.keys, layer.values, layer.cumulative_length) if fits and not offloaded else None


def is_empty(cache: Any, index: int) -> bool:
    """Whether a layer of the cache holds no keys, so that its queries see the new keys alone.

    False for layers of other classes, whose `update` may return other keys. It does not wait for a GPU: a static layer
    counts as empty until it is allocated for its first keys.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        return False
    if index >= len(layers):
        return getattr(cache, "layer_class_to_replicate", None) in PLAIN_LAYERS
    layer = layers[index]
    return type(layer) in PLAIN_LAYERS and (not layer.is_initialized or not layer.keys.numel())
