"""Steps of generation whose launches are repeated, and what a CUDA graph demands of them."""

from __future__ import annotations

from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_qknorm.ops import library, operators
from hf_qknorm.ops.registration import flatten_norms
from hf_qknorm.ops.triton import plans
from hf_qknorm.ops.triton.launch import Launch, recorded
from hf_qknorm.ops.types import Heads, LayerCache, Norm, Options, Rotary, Visible
from qknorm_tests.random_qkv import make_qkv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROOM, FILLED = 600, 520


class Step(NamedTuple):
    """The arguments of `library.fused_step`."""

    heads: Heads
    cache: LayerCache
    visible: Visible
    options: Options

    @classmethod
    def draw(cls, seed: int, queries: int = 1, dtype: torch.dtype = torch.float16) -> Step:
        q, k, v = (x.detach().to(DEVICE) for x in make_qkv(2, 4, 2, queries, queries, 16, dtype=dtype, seed=seed))
        _, keys, values = (x.detach().to(DEVICE) for x in make_qkv(2, 4, 2, 1, ROOM, 16, dtype=dtype, seed=seed + 1))
        norms = [Norm("rms", torch.linspace(0.5, 2.0, 16).to(q)), Norm("rms", torch.linspace(1.5, 0.5, 16).to(q))]
        angles = torch.linspace(0.0, 3.0, 8 * queries).view(1, queries, 8) + seed
        ranges = torch.stack([torch.zeros(2, queries), torch.arange(queries).expand(2, -1) + FILLED + 1], -1)
        filled = torch.tensor(FILLED, device=DEVICE)
        heads = Heads(q, k, v, *norms, Rotary(angles.cos().to(q), angles.sin().to(q)))
        visible = Visible(ranges.to(DEVICE, torch.int32))
        return cls(heads, LayerCache(keys, values, filled), visible, Options(0.25, 50.0))

    def run(self) -> dict[str, Tensor]:
        """The output and the cache after it."""
        return {"out": library.fused_step(*self), **self.cache._asdict()}

    def appended(self, keys: int) -> Step:
        """The same over this many keys of a dynamic cache, with room for the new tokens behind them."""
        seen = keys + self.heads.q.shape[2]
        for x in (self.cache.keys, self.cache.values):
            x[:, :, seen:] = torch.nan  # memory that nothing has written to yet
        cache = LayerCache(self.cache.keys[:, :, :seen], self.cache.values[:, :, :seen])
        return self._replace(cache=cache, visible=Visible(), options=self.options._replace(causal=True, window=500))

    def in_two(self) -> dict[str, Tensor]:
        """The same by two operators, and copies between them."""
        heads, (keys, values, filled), visible, options = self
        count = heads.q.shape[2]
        start = keys.shape[2] - count if filled is None else filled
        q, k = library.norm_rope(heads)
        for x, new in ((keys, k), (values, heads.v)):
            x.index_copy_(2, start + torch.arange(count, device=DEVICE), new)
        out = library.fused_attention(Heads(q, keys, values), visible, options)
        return {"out": out, "keys": keys, "values": values, "filled": None if filled is None else filled + count}


@pytest.mark.costly
@pytest.mark.parametrize("queries", [1, 9])
def test_steps_equal_two_operators(queries: int) -> None:
    """The third step repeats the launches of the second, with other tensors."""
    for seed in (0, 2, 4):
        torch.testing.assert_close(Step.draw(seed, queries).run(), Step.draw(seed, queries).in_two(), rtol=0, atol=0)


@pytest.mark.costly
@pytest.mark.parametrize("queries", [9])
def test_steps_over_growing_keys_equal_two_operators(queries: int) -> None:
    """They repeat the launches of the second, over other numbers of keys; the last has keys for another split."""
    for seed, keys in ((0, 300), (2, 301), (4, 310), (6, 504), (8, 520), (10, 530)):
        got, expected = (Step.draw(seed, queries).appended(keys) for _ in range(2))
        torch.testing.assert_close(got.run(), expected.in_two(), rtol=0, atol=0)
        whole = got.cache.keys._base, expected.cache.keys._base
        torch.testing.assert_close(*whole, rtol=0, atol=0, equal_nan=True)  # nothing is written behind the keys


@pytest.mark.parametrize("queries", [1, 3])
def test_a_step_is_two_launches(queries: int) -> None:
    for step in (Step.draw(0, queries), Step.draw(0, queries).appended(FILLED)):
        values = library.flatten(step.heads, step.visible, step.options) | step.cache._asdict()
        launched: list[Launch] = []
        with recorded(launched):
            operators.FUSED_STEP.run(values)
        assert len(launched) == 2


def test_a_step_of_known_shapes_only_allocates_and_launches() -> None:
    for seed in (0, 2):
        Step.draw(seed).run()
    launched: list[Launch] = []
    with recorded(launched):  # by `launch`, which a repeated call passes over
        Step.draw(4).run()
    assert not launched


def test_another_address_is_another_signature() -> None:
    """A kernel that is compiled for aligned tensors reads others wrongly."""
    x, repeated = torch.zeros(9, dtype=torch.float16), plans.Repeated(operators.NORM_ROPE_HEADS)
    norms = flatten_norms(Norm(), Norm(), None)
    aligned, shifted, other = (
        repeated.signature({"q": q, "k": None, **norms})[0] for q in (x[:8], x[1:], torch.zeros_like(x[:8]))
    )
    assert aligned == other != shifted


def test_a_record_has_the_launches_of_its_own_thread() -> None:
    """Else the plan of one thread's step would launch, or lack, the kernels of another's."""
    launches: list[Launch] = []
    with recorded(launches):
        other = Thread(target=Step.draw(0, 3).run)  # of three tokens, which is not repeated
        other.start()
        other.join()
        assert not launches
        Step.draw(0, 3).run()
        assert launches


class OnTheDevice(TorchDispatchMode):
    """Fails where the host would wait for a GPU, or copy to it, which no CUDA graph captures."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "_to_copy", "equal", "item", "masked_select", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.WAITING, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("queries", [1, 3])
def test_a_step_never_waits_for_the_device(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators.FUSED_STEP, "check_numbers", lambda values: None)  # of CPU tensors alone
    step = Step.draw(0, queries)
    for run in (operators.FUSED_STEP.run, operators.FUSED_STEP.direct):
        values = library.flatten(step.heads, step.visible, step.options) | step.cache._asdict()
        with OnTheDevice():
            run(values)


def test_a_repeated_step_over_keys_without_room_is_refused() -> None:
    """A plan serves any number of keys, and has no check that the new tokens fit among them."""
    new, memory = Step.draw(0, queries=4), torch.full((2, 2, 2, 30, 16), 7.0, dtype=torch.float16, device=DEVICE)

    def step(keys: int) -> Tensor:
        cache = LayerCache(*memory[:, :, :, 10 : 10 + keys])
        return library.fused_step(new.heads, cache, Visible(), Options(0.25))

    for keys in (10, 11, 12):
        step(keys)
    before = memory.clone()
    for keys in (3, 2, 1):
        with pytest.raises(ValueError, match=rf"cache of keys \[2, 2, {keys}, 16\] has no room for 4 tokens"):
            step(keys)
    assert torch.equal(memory, before)
