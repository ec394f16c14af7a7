"""transformers' caches: room for new tokens in a layer, which a kernel can write to, and empty layers.

A dynamic layer of transformers copies all its keys for each new token. Here it gets room behind its keys, which later
tokens fill: its keys and values become views of larger tensors. Nothing else writes to these. A layer whose keys are
not the latest from here, as after `crop` or a choice of beams, is copied first.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_qknorm.ops.registration import is_intercepted
from hf_qknorm.ops.types import LayerCache

PLAIN_LAYERS: Final = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
SHARE: Final = 16  # a dynamic layer gets room for a share of its tokens, 1/SHARE, within these limits
LEAST_ROOM, MOST_ROOM = 16, 256
ALIGNED: Final = 16  # rows in all are a multiple of it: strides are too, for which kernels are compiled


class _Latest(NamedTuple):
    """The latest keys and values of a dynamic layer from `Room.keep`, and the number of free rows behind them."""

    keys: ref[Tensor]
    values: ref[Tensor]
    free: int


_latest: WeakKeyDictionary[DynamicLayer, _Latest] = WeakKeyDictionary()


class Room(NamedTuple):
    """Keys and values of a layer with room for new tokens, and the number of rows that stay free behind them.

    A static layer, of which `layer` is None, counts its filled rows in a tensor: operators add to it in place, as
    compiled graphs expect. A dynamic layer stays as it is until `keep`.
    """

    cache: LayerCache
    layer: Any = None
    free: int = 0

    def keep(self) -> None:
        """Let a dynamic layer keep its new tokens, once they are written."""
        layer, (keys, values, _) = self.layer, self.cache
        if layer is None:
            return
        if type(layer) is DynamicSlidingWindowLayer:
            layer.cumulative_length += keys.shape[2] - layer.keys.shape[2]
            if keys.shape[2] >= layer.sliding_window:
                keys, values = (x[:, :, 1 - layer.sliding_window :] for x in (keys, values))
        layer.keys, layer.values = keys, values
        _latest[layer] = _Latest(ref(keys), ref(values), self.free)


def room(cache: Any, index: int, new: Tensor) -> Room | None:
    """Room for new keys `[B, Hk, T, D]` and values of the same shape in a layer of a cache.

    None for a layer that is not a plain one, is not allocated, or does not fit. None for a dynamic layer that is empty,
    and in a graph, where its number of keys may be a symbol.
    """
    if not _is_plain(cache) or cache.offloading or index >= len(cache.layers):
        return None
    layer = cache.layers[index]
    if not getattr(layer, "is_initialized", False):
        return None
    if type(layer) is StaticLayer:
        fits = layer.keys.device == new.device and layer.keys.dtype == new.dtype
        return Room(LayerCache(layer.keys, layer.values, layer.cumulative_length)) if fits else None
    return _behind(layer, new) if _is_growing(layer, new) and not is_intercepted((new,)) else None


def update(cache: Any, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's keys and values `[B, Hk, S, D]`, with the new ones `[B, Hk, T, D]` behind the earlier ones.

    It is `cache.update`, which copies no earlier keys where a dynamic layer has room, and nothing needs a gradient.
    """
    into = None if torch.is_grad_enabled() or keys.shape != values.shape else room(cache, index, keys)
    if into is None or into.layer is None:
        updated: tuple[Tensor, Tensor] = cache.update(keys, values, index)
        return updated
    count, (all_keys, all_values, _) = keys.shape[2], into.cache
    all_keys[:, :, -count:], all_values[:, :, -count:] = keys, values
    into.keep()
    return all_keys, all_values


def _is_plain(cache: Any) -> bool:
    """Whether a cache's `update` is that of its layers."""
    return getattr(type(cache), "update", None) is Cache.update


def _is_growing(layer: Any, new: Tensor) -> bool:
    """Whether a layer is a dynamic one whose keys and values the new ones continue, without earlier states to keep."""
    if type(layer) is not DynamicLayer and (type(layer) is not DynamicSlidingWindowLayer or layer.record_past):
        return False
    keys, values, (batch, heads, _, head_dim) = layer.keys, layer.values, new.shape
    if not (keys.numel() and keys.dtype == values.dtype == new.dtype and keys.device == values.device == new.device):
        return False
    return keys.shape == values.shape == (batch, heads, keys.shape[2], head_dim)


def _behind(layer: DynamicLayer, new: Tensor) -> Room:
    """Keys and values of a dynamic layer with room for new ones: those that it has, or copies."""
    latest, keys, values, count = _latest.get(layer), layer.keys, layer.values, new.shape[2]
    frozen = keys.is_inference() and not torch.is_inference_mode_enabled()  # it can't be written to
    if latest is None or latest.keys() is not keys or latest.values() is not values or latest.free < count or frozen:
        rows = keys.shape[2] + max(count, min(max(keys.shape[2] // SHARE, LEAST_ROOM), MOST_ROOM))
        rows += -rows % ALIGNED
        free = rows - keys.shape[2]
        keys, values = (_copy(x, rows) for x in (keys, values))
    else:
        free = latest.free
    batch, heads, filled, head_dim = keys.shape
    size = batch, heads, filled + count, head_dim
    grown = LayerCache(keys.as_strided(size, keys.stride()), values.as_strided(size, values.stride()))
    return Room(grown, layer, free - count)


def _copy(x: Tensor, rows: int) -> Tensor:
    """x `[B, Hk, S, D]` in another place, with free rows behind it up to `rows` in all."""
    batch, heads, filled, head_dim = x.shape
    return x.new_empty(batch, heads, rows, head_dim)[:, :, :filled].copy_(x)


def is_empty(cache: Any, index: int) -> bool:
    """Whether a layer of the cache holds no keys, so that its queries see the new keys alone.

    False for caches and layers of other classes, whose `update` may return other keys. It does not wait for a GPU: a
    static layer counts as empty until it is allocated for its first keys.
    """
    if not _is_plain(cache):
        return False
    if index >= len(cache.layers):
        return cache.layer_class_to_replicate in PLAIN_LAYERS
    layer = cache.layers[index]
    return type(layer) in PLAIN_LAYERS and (not layer.is_initialized or not layer.keys.numel())
