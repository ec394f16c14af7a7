"""Steps behind a cache without `position_ids`, in Bamba: transformers' own model numbers each call's tokens from 0.

Its mixers compute in fp32 whatever the model's dtype. Here they compute in fp64, as the model does: a step is then the
uncached forward to the last digits, and a wrong position or mask is an error of 0.01 and more.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.models.bamba.modeling_bamba import BambaMixer

from hf_qknorm import patch_model, unpatch_model
from hf_qknorm.families.style import CACHE
from qknorm_tests.tables import LENGTH, assert_near, fingerprint, make_batch, randomise, real, sharp_model

PROMPT = 8
EXACT = 1e-13


@pytest.fixture(autouse=True)
def mixers_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = BambaMixer.forward

    def exactly(*args: Any, **kwargs: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "float", Tensor.double)
            return forward(*args, **kwargs)

    monkeypatch.setattr(BambaMixer, "forward", exactly)


def made(scheme: str) -> PreTrainedModel:
    return randomise(patch_model(sharp_model("bamba").double(), scheme))


@torch.no_grad()
def in_steps(model: Any, batch: dict[str, Any], size: int = 1, cache: Any = None, positions: bool = False) -> Tensor:
    """The first output of a prompt and of the tokens after it, `size` at a time, `[B, T, ...]`."""
    cache, found = cache or DynamicCache(config=model.config), []
    for start, stop in [(0, PROMPT), *((n, min(n + size, LENGTH)) for n in range(PROMPT, LENGTH, size))]:
        piece = {name: x[:, start:stop] for name, x in batch.items() if name != "attention_mask"}
        piece |= {"attention_mask": batch["attention_mask"][:, :stop]} if "attention_mask" in batch else {}
        piece |= {"position_ids": torch.arange(start, stop)[None]} if positions else {}
        found.append(model(**piece, **{CACHE: cache}, use_cache=True)[0])
    return torch.cat(found, 1)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "left"])
@pytest.mark.parametrize("scheme", ["none", "qk_norm", "soft_cap", "qk_norm_cap"])
@torch.no_grad()
def test_steps_are_the_uncached_forward(scheme, kind, size):
    model, batch = made(scheme), make_batch(kind, labels=False)
    expected = model(**batch, use_cache=False).logits[real(batch)]
    assert_near(in_steps(model, batch, size)[real(batch)], expected, EXACT)


@torch.no_grad()
def test_steps_of_embeddings_and_in_a_static_cache():
    model, batch = made("qk_norm_cap"), make_batch("plain", labels=False)
    expected = model(**batch, use_cache=False).logits
    embeddings = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"])}
    assert_near(in_steps(model, embeddings), expected, EXACT)
    assert_near(in_steps(model, batch, cache=StaticCache(model.config, max_cache_len=LENGTH)), expected, EXACT)


def test_given_positions_stay():
    model, plain, batch = made("none"), sharp_model("bamba").double(), make_batch("left", labels=False)
    expected = in_steps(plain, batch, positions=True)
    assert torch.equal(in_steps(model, batch, positions=True), expected)
    assert torch.equal(in_steps(model, batch), expected)
    far = {"input_ids": batch["input_ids"], "position_ids": 5 * torch.arange(LENGTH)[None]}
    assert torch.equal(in_steps(model, far), in_steps(plain, far))


def test_a_call_without_tokens_is_refused_by_the_model():
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        made("none").base_model(**{CACHE: DynamicCache()})


@torch.no_grad()
def test_steps_of_a_model_with_accelerates_hook():
    model, batch = sharp_model("bamba").double().base_model, make_batch("plain", labels=False)
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    before, plain = fingerprint(model), model(**batch)[0]
    randomise(patch_model(model, "qk_norm_cap"))
    assert_near(in_steps(model, batch), model(**batch, use_cache=False)[0], EXACT)
    assert torch.equal(unpatch_model(model)(**batch)[0], plain)
    assert fingerprint(model)[:-1] == before[:-1]
    assert type(model).forward is not type(made("none").base_model).forward
