"""transformers' caches: room for new tokens in a layer, which a kernel can write to, and empty layers.

A dynamic layer of transformers copies all its keys for each new token. Here it gets room behind its keys, which later
tokens fill: its keys and values become views of larger tensors. Nothing else writes to these. A layer whose keys are
not the latest from here, as after `crop` or a choice of beams, is copied first. It is copied after a step if anyone
else holds its earlier keys or values, who may edit them.
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

from hf_qknorm.families.style import add_to_cache
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

    A static layer (`layer` is None) counts its filled rows in a tensor: operators add to it in place, as
    compiled graphs expect. A dynamic layer stays as it is until `keep`.
    """

    cache: LayerCache
    layer: Any = None
    free: int = 0

    def keep(self) -> None:
        """Let a dynamic layer keep its new tokens, once they are written."""
        layer, (keys, values, _), free = self.layer, self.cache, self.free
        if layer is None:
            return
        if type(layer) is DynamicSlidingWindowLayer:
            layer.cumulative_length += keys.shape[2] - layer.keys.shape[2]
            if keys.shape[2] >= layer.sliding_window:
                keys, values = (x[:, :, 1 - layer.sliding_window :] for x in (keys, values))
        layer.keys, layer.values = keys, values
        own = 1 if keys is self.cache.keys else 2  # a window of them, and all
        if max(map(_holders, (keys, values))) > own:
            layer.keys, layer.values, free = _with_room(keys, values, 0)
        _latest[layer] = _Latest(ref(layer.keys), ref(layer.values), free)


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
        fits = all(x.device == new.device and x.dtype == new.dtype for x in (layer.keys, layer.values))
        return Room(LayerCache(layer.keys, layer.values, layer.cumulative_length)) if fits else None
    return _behind(layer, new) if _is_growing(layer, new) and not is_intercepted((new,)) else None


def update(
    cache: Any, index: int, keys: Tensor, values: Tensor, options: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """A layer's keys and values `[B, Hk, S, D]`, with the new ones `[B, Hk, T, D]` behind the earlier ones.

    It is `cache.update`, which copies no earlier keys where a dynamic layer has room, and nothing needs a gradient. Of
    a layer in another dtype, as where autocast begins or ends, the result has the dtype of the new ones. `options` are
    the further arguments of the attention function, to which a paged cache adds its own.
    """
    into = None if torch.is_grad_enabled() or keys.shape != values.shape else room(cache, index, keys)
    if into is None or into.layer is None:
        k_dtype, v_dtype = _stored(cache, index, keys, values)
        if (k_dtype, v_dtype) == (keys.dtype, values.dtype):
            return add_to_cache(cache, keys, values, index, options)
        with torch.autocast(keys.device.type, enabled=False):  # which can't join fp16 and bf16
            all_keys, all_values = add_to_cache(cache, keys.to(k_dtype), values.to(v_dtype), index, options)
        return all_keys.to(keys.dtype), all_values.to(values.dtype)
    count, (all_keys, all_values, _) = keys.shape[2], into.cache
    all_keys[:, :, -count:], all_values[:, :, -count:] = keys, values
    into.keep()
    return all_keys, all_values


def _stored(cache: Any, index: int, keys: Tensor, values: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes in which a layer stores keys and values: a static one its own, a dynamic one the wider of the two.

    The two may differ since transformers 5.24: without the patch, autocast makes fp32 keys.
    """
    layer: Any = cache.layers[index] if _is_plain(cache) and index < len(cache.layers) else None
    if type(layer) not in PLAIN_LAYERS or not layer.is_initialized:
        return keys.dtype, values.dtype
    own = layer.keys.dtype, layer.values.dtype
    if isinstance(layer, StaticLayer):
        return own
    return torch.promote_types(own[0], keys.dtype), torch.promote_types(own[1], values.dtype)


def _is_plain(cache: Any) -> bool:
    """Whether a cache has transformers' own `update`."""
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
    """Keys and values of a dynamic layer with room for new ones: its own, or copies."""
    latest, keys, values, count = _latest.get(layer), layer.keys, layer.values, new.shape[2]
    frozen = keys.is_inference() and not torch.is_inference_mode_enabled()  # it can't be written to
    if latest is None or latest.keys() is not keys or latest.values() is not values or latest.free < count or frozen:
        keys, values, free = _with_room(keys, values, count)
    else:
        free = latest.free
    return Room(LayerCache(_grown(keys, count), _grown(values, count)), layer, free - count)


def _with_room(keys: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
    """Copies of keys and values `[B, Hk, S, D]`, and the number of free rows behind them: `count` at least."""
    batch, heads, filled, head_dim = keys.shape
    rows = filled + max(count, min(max(filled // SHARE, LEAST_ROOM), MOST_ROOM))
    rows += -rows % ALIGNED
    keys, values = (x.new_empty(batch, heads, rows, head_dim)[:, :, :filled].copy_(x).data for x in (keys, values))
    return keys, values, rows - filled


def _grown(x: Tensor, count: int) -> Tensor:
    """x `[B, Hk, S, D]` with `count` more rows of its memory.

    Its version counter is its own: a graph over x stays valid when these rows are written.
    """
    batch, heads, filled, head_dim = x.shape
    return x.as_strided((batch, heads, filled + count, head_dim), x.stride()).data


def _holders(x: Tensor) -> int:
    """The number of tensors, in Python or a graph, that share the memory of x, x included."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) - 1  # the storage's own object


def without_room(layer: DynamicLayer) -> Any:
    """A layer for copy and pickle, without its room."""
    if _latest.pop(layer, None) is not None:
        layer.keys, layer.values = (x.clone(memory_format=torch.contiguous_format) for x in (layer.keys, layer.values))
    return layer.__reduce_ex__(2)


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
