"""Keys and values that a caller holds or stores, of caches with room: they are those of transformers' caches."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_qknorm.attend.caches import LEAST_ROOM, update
from qknorm_tests.growing_caches import LAYERS, append, assert_same, cache_of, states, tokens

HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "a part": lambda x: x[:, 1:, :2],
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
    "numpy": lambda x: x.numpy(),
    "DLPack": torch.from_dlpack,
}


def stepped(kind: str) -> tuple[DynamicCache, DynamicCache]:
    """A cache with room, and one of transformers, after the same two steps."""
    ours, theirs = (cache_of(LAYERS[kind]()) for _ in range(2))
    for seed in (1, 2):
        append(ours, tokens(1, seed))
        theirs.update(*tokens(1, seed), 0)
    return ours, theirs


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_graph_over_kept_tensors_stays_valid(kind: str, name: str) -> None:
    ours, _ = stepped(kind)
    kept = getattr(ours.layers[0], name)
    expected, weight = kept.clone(), torch.zeros_like(kept, requires_grad=True)
    result = (kept * weight).sum()
    for seed in (3, 4):
        append(ours, tokens(1, seed))
    result.backward()
    assert_same(weight.grad, expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_keys_that_nobody_holds_any_more_are_not_copied(kind: str) -> None:
    ours, _ = stepped(kind)
    kept = ours.layers[0].keys
    places = set()
    for seed in range(4):
        append(ours, tokens(1, seed))
        places.add(ours.layers[0].keys.untyped_storage().data_ptr())
        del kept
        kept = None
    assert len(places) == 1
    assert kept is None


def stored(cache: Any) -> bytes:
    file = io.BytesIO()
    torch.save(cache, file)
    return file.getvalue()


@pytest.mark.parametrize("kind", LAYERS)
def test_the_room_is_not_stored(kind: str) -> None:
    ours, theirs = stepped(kind)
    with_room = ours.layers[0].keys.untyped_storage().nbytes()
    before = [x.clone() for x in states(ours)[:2]]
    written = stored(ours)
    assert b"hf_qknorm" not in written
    assert len(written) <= len(stored(theirs))
    loads: list[Any] = [torch.load(io.BytesIO(written), weights_only=False), pickle.loads(pickle.dumps(ours))]
    for found in (*loads, copy.deepcopy(ours)):
        layer = found.layers[0]
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes < with_room
        assert_same(states(found), states(theirs))
    assert_same(states(ours)[:2], before)
    for found in (*loads, ours):
        expected = copy.deepcopy(theirs)
        for seed in (3, 4):
            assert_same(append(found, tokens(1, seed)), expected.update(*tokens(1, seed), 0))


class Pair:
    """A cache with room and one of transformers, and what a caller holds of each, under the same random calls."""

    def __init__(self, kind: str, seed: int) -> None:
        self.pick = random.Random(seed)
        self.caches = [cache_of(LAYERS[kind]()) for _ in range(2)]
        self.held: list[list[Any]] = []
        self.calls: list[str] = []

    def step(self) -> None:
        name = self.pick.choice(("append", "append", "hold", "hold", "drop", "edit held", "edit", "reorder", "copy"))
        self.calls.append(name)
        getattr(self, name.replace(" ", "_"))()
        for ours, theirs in (*zip(*map(states, self.caches), strict=True), *self.held):
            same = torch.equal(ours, theirs) if isinstance(ours, Tensor) else bool(ours == theirs)
            assert same, self.calls

    def append(self) -> None:
        new, inference = tokens(self.pick.choice((1, 1, 2, LEAST_ROOM + 1)), len(self.calls)), self.pick.random() < 0.2
        with torch.inference_mode() if inference else torch.no_grad():
            assert_same(update(self.caches[0], 0, *new), self.caches[1].update(*new, 0))

    def hold(self) -> None:
        name, holder = self.pick.choice(("keys", "values")), self.pick.choice(list(HOLDERS.values()))
        self.held.append([torch.as_tensor(holder(getattr(cache.layers[0], name))) for cache in self.caches])

    def drop(self) -> None:
        self.held = self.held[1:]

    @torch.inference_mode()
    def edit_held(self) -> None:
        for tensor in self.pick.choice(self.held) if self.held else ():
            tensor[..., :1] = len(self.calls)

    @torch.inference_mode()
    def edit(self) -> None:
        for cache in self.caches:
            cache.layers[0].keys[:, :, -1:] = len(self.calls)

    def reorder(self) -> None:
        for cache in self.caches:
            cache.reorder_cache(torch.tensor([1, 0]))

    def copy(self) -> None:
        self.caches = [copy.deepcopy(cache) for cache in self.caches]


@pytest.mark.parametrize("kind", LAYERS)
def test_no_calls_tell_the_caches_apart(kind: str) -> None:
    for seed in range(20):
        pair = Pair(kind, seed)
        for _ in range(40):
            pair.step()
