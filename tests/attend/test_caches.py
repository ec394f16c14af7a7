"""Room for new tokens in transformers' caches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from hf_qknorm.attend.caches import LEAST_ROOM, SHARE, is_empty, room, update
from qknorm_tests.growing_caches import LAYERS, WINDOW, append, assert_same, cache_of, states, tokens
from qknorm_tests.tables import assert_near


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", LAYERS)
def test_tokens_are_appended_as_by_update(kind: str, count: int) -> None:
    """More than fit the first room, so that the keys are copied again."""
    ours, theirs = (cache_of(LAYERS[kind]()) for _ in range(2))
    for seed in range(2 * LEAST_ROOM // count + 2):
        new = tokens(count, seed)
        assert_same(append(ours, new), theirs.update(*new, 0))
        assert_same(states(ours), states(theirs))


@torch.no_grad()
def test_a_graph_copies_the_keys() -> None:
    """Of as many keys as it is given."""
    grown = torch.compile(lambda x, y: update(cache, 0, x, y), fullgraph=True, backend="eager")
    for cached in (4, 6):
        cache, expected = (cache_of(DynamicLayer(), cached) for _ in range(2))
        assert_same(grown(*tokens(1)), expected.update(*tokens(1), 0))
        assert cache.layers[0].keys.is_contiguous()
        with torch.device("cpu"):  # a default device, which is no graph
            update(cache, 0, *tokens(1))
        assert not cache.layers[0].keys.is_contiguous()


def test_an_update_with_gradients_keeps_them() -> None:
    cache, (keys, values) = cache_of(DynamicLayer()), tokens(1)
    grown, _ = update(cache, 0, keys.requires_grad_(), values)
    grown.sum().backward()
    assert_same(keys.grad, torch.ones_like(keys))


@torch.no_grad()
def test_values_of_another_width_are_copied() -> None:
    """As those of latent attention."""
    cache, (keys, values) = DynamicCache(), tokens(5)
    for _ in range(2):
        grown = update(cache, 0, keys, values[..., :2])
    assert_same(grown, (torch.cat([keys, keys], 2), torch.cat([values, values], 2)[..., :2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [DynamicLayer, lambda: StaticLayer(16)])
@torch.no_grad()
def test_keys_and_values_may_be_stored_in_two_dtypes(make: Callable[[], Any], dtype: torch.dtype) -> None:
    """As transformers 5.24 stores those of a model without the patch under autocast."""
    cache, new = cache_of(make()), tuple(x.to(dtype) for x in tokens(2, 1))
    layer = cache.layers[0]
    layer.values = layer.values.bfloat16()
    before = [x[:, :, :7].clone() for x in (layer.keys, layer.values)]
    for got, old, added in zip(update(cache, 0, *new), before, new, strict=True):
        assert got.dtype == dtype
        assert_same(got[:, :, :7], old.to(dtype))
        assert_near(got[:, :, 7:9], added, 0.02)  # rounded to bfloat16 at most
    assert layer.keys.dtype == torch.float32


@pytest.mark.parametrize("kind", LAYERS)
def test_keys_are_copied_once_for_many_tokens(kind: str) -> None:
    cache = cache_of(LAYERS[kind](), 2 * SHARE * LEAST_ROOM)
    places = []
    for seed in range(2 * LEAST_ROOM):
        append(cache, tokens(1, seed))
        places.append(cache.layers[0].keys.untyped_storage().data_ptr())
    copies = 2 if kind == "sliding" else 1  # of the few keys in the window; transformers keeps all for a window of one
    assert len(set(places)) == copies
    assert places == sorted(places, key=places.index)


def cropped(cache: Any) -> Any:
    cache.crop(-2)
    return cache


def restored(cache: Any) -> Any:
    """The keys and values of an earlier step, as a caller keeps them to try other continuations."""
    before = cache.layers[0].keys, cache.layers[0].values
    append(cache, tokens(1, 9))
    cache.layers[0].keys, cache.layers[0].values = before
    return cache


def shared(cache: Any) -> Any:
    """Another cache of the same tensors."""
    other = cache_of(DynamicLayer(), 0)
    other.layers[0] = copy.copy(cache.layers[0])
    return other


BRANCHES = [cropped, restored, shared, copy.deepcopy]


@pytest.mark.parametrize("branch", BRANCHES)
def test_no_continuation_changes_another(branch: Callable[[Any], Any]) -> None:
    """The tensors of a layer, once seen, keep their numbers, whatever is appended here or there."""
    cache = cache_of(DynamicLayer())
    append(cache, tokens(3, 1))
    seen = (cache.layers[0].keys, cache.layers[0].values)
    before = [x.clone() for x in seen]
    other = branch(cache)
    expected = copy.deepcopy(other)
    for seed in (2, 3):
        assert_same(append(other, tokens(1, seed)), expected.update(*tokens(1, seed), 0))
        if other is not cache:
            append(cache, tokens(1, seed + 10))
        assert_same(list(seen), before)
        assert_same(states(other), states(expected))


def test_a_layer_stays_as_it_was_until_it_keeps_its_tokens() -> None:
    """As after an error of the kernel."""
    for filled in (7, 8):
        cache = cache_of(DynamicLayer())
        if filled == 8:
            append(cache, tokens(1, 1))
        before = states(cache)
        keys = before[0].clone()
        into = room(cache, 0, tokens(1)[0])
        assert into is not None
        into.cache.keys[:, :, -1:] = 0
        assert states(cache)[0] is before[0]
        assert_same(before[0], keys)
        assert_same(append(cache, tokens(1, 2))[0], torch.cat([keys, tokens(1, 2)[0]], 2))


class Own(DynamicCache):
    """A cache whose `update` returns other keys."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, layer_idx, **kwargs)
        return keys * 2, values


class OwnLayer(DynamicLayer):
    """A layer with an `update` of its own."""


def own_cache() -> DynamicCache:
    cache = Own()
    cache.update(*tokens(7), 0)
    return cache


def recording() -> DynamicCache:
    cache = cache_of(DynamicSlidingWindowLayer(WINDOW))
    cache.layers[0].activate_past_recording()
    return cache


def in_fp64() -> DynamicCache:
    cache = cache_of(DynamicLayer())
    cache.layers[0].keys = cache.layers[0].keys.double()
    return cache


def of_one_row() -> DynamicCache:
    cache = cache_of(DynamicLayer())
    cache.batch_select_indices(torch.tensor([0]))
    return cache


def emptied() -> DynamicCache:
    cache = cache_of(DynamicLayer())
    cache.crop(-7)
    return cache


WITHOUT_ROOM = {
    "no cache": lambda: None,
    "an own update": own_cache,
    "an own layer": lambda: cache_of(OwnLayer()),
    "not allocated": lambda: cache_of(DynamicLayer(), 0),
    "of no tokens": emptied,
    "too few layers": DynamicCache,
    "a record of the past": recording,
    "another dtype": in_fp64,
    "another batch": of_one_row,
}


@pytest.mark.parametrize("name", WITHOUT_ROOM)
def test_other_layers_have_no_room(name: str) -> None:
    cache = WITHOUT_ROOM[name]()
    assert room(cache, 0, tokens(1)[0]) is None


def test_forward_mode_has_no_room() -> None:
    """Tangents would be dropped where a kernel writes to a cache."""
    cache, new = cache_of(DynamicLayer()), tokens(1)[0]
    with forward_ad.dual_level():
        assert room(cache, 0, new) is None
    assert room(cache, 0, new) is not None


def test_a_cache_with_its_own_update_is_never_empty() -> None:
    """Its first queries may see other keys than the new ones."""
    assert is_empty(DynamicCache(), 0)
    assert is_empty(emptied(), 0)
    assert not is_empty(Own(), 0)
    assert not is_empty(cache_of(OwnLayer(), 0), 0)
    assert not is_empty(cache_of(DynamicLayer()), 0)


def test_inference_mode_and_gradients_may_follow() -> None:
    cache = cache_of(DynamicLayer())
    with torch.inference_mode():
        append(cache, tokens(1, 1))
    with torch.no_grad():
        keys, _ = append(cache, tokens(1, 2))
    grown = cache.update(*(x.requires_grad_() for x in tokens(1, 3)), 0)[0]
    grown.sum().backward()
    assert_same(grown[:, :, :-1].detach(), keys)
