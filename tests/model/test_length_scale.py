"""The length scale: its factors, models with it beside the same by hand, caches, padding, packing, and refusals."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from tables import sharp_model
from tiny import tiny_model
from transformers import AutoModelForCausalLM

import hf_qknorm as qk
from hf_qknorm import SCHEMES, Scheme
from hf_qknorm.export.targets import find_target
from hf_qknorm.families import FAMILIES, check_scheme, known_families
from hf_qknorm.families.style import CACHE
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.length_scale import largest_factor, length_factors
from hf_qknorm.model.plain_attention import PlainAttention
from hf_qknorm.stats.bounds import logit_bounds
from hf_qknorm.stats.logits import _keys_seen, visible_keys

LENGTH = 6
ALONE = Scheme(length_scale=LENGTH)
NORMED = dataclasses.replace(SCHEMES["qk_norm_cap"], length_scale=LENGTH)
STYLES = ("llama", "gpt2", "gpt_neox", "phi3", "gemma2", "mistral", "qwen3", "deepseek_v3", "opt", "jamba")


def tokens(rows: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(0))


def logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **inputs).logits


def patched(model_type: str, scheme: Scheme, **settings: Any) -> Any:
    return qk.patch_model(sharp_model(model_type, **settings), scheme).eval()


def test_the_factor_is_1_at_the_trained_length():
    factors = length_factors(torch.arange(-1, 10), LENGTH, None)
    expected = [0.0, *(math.log(n) / math.log(LENGTH) for n in range(1, 11))]
    assert factors.tolist() == pytest.approx(expected)
    assert factors[LENGTH] == 1
    assert length_factors(torch.tensor([1, 3, 9]), LENGTH, 4).tolist() == pytest.approx([0.5, 1.0, 1.0])
    assert largest_factor(36, LENGTH, None) == pytest.approx(2.0)


def test_a_window_of_one_key_has_factors_of_0():
    assert length_factors(torch.arange(4), LENGTH, 1).tolist() == [0.0] * 4
    assert length_factors(torch.arange(4), LENGTH, 2).tolist() == [0.0, 1.0, 1.0, 1.0]
    model = patched("mistral", NORMED, sliding_window=1)
    assert torch.isfinite(logits(model, tokens())).all()
    assert all(bound == 0 for bound in logit_bounds(model).values())


@pytest.mark.parametrize("model_type", STYLES)
@pytest.mark.parametrize("normed", [False, True])
def test_queries_are_multiplied_by_hand(model_type, normed, monkeypatch):
    """The same model without the scale, its rotated queries multiplied where the backend takes them."""
    family = FAMILIES[model_type]
    if normed and family.own_norms:
        pytest.skip("takes no norms")
    plain = dataclasses.replace(SCHEMES["qk_norm"], softcap=None) if normed else SCHEMES["none"]
    model = patched(model_type, dataclasses.replace(plain, length_scale=LENGTH))
    ids = tokens()
    found = logits(model, ids)
    for layer in patched_layers(model).values():
        layer.scheme = dataclasses.replace(layer.scheme, length_scale=None)
    without, call = logits(model, ids), PlainAttention._call_backend

    def scaled(self: Any, q: torch.Tensor, k: Any, v: Any, mask: Any, options: Any) -> Any:
        seen = torch.arange(1, q.shape[2] + 1).clamp_max(self.window or q.shape[2])
        trained = min(LENGTH, self.window or LENGTH)
        return call(self, q * (seen.log() / math.log(trained))[:, None], k, v, mask, options)

    monkeypatch.setattr(PlainAttention, "_call_backend", scaled)
    torch.testing.assert_close(found, logits(model, ids), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, without, atol=1e-3)


@pytest.mark.parametrize("backend", ["eager", "hf_qknorm", "hf_qknorm_eager", "hf_qknorm_tiled", "sdpa"])
@pytest.mark.parametrize("scheme", [ALONE, NORMED])
def test_all_ways_of_attention_agree(backend, scheme):
    if backend == "sdpa" and scheme.softcap:
        pytest.skip("sdpa has no cap")
    model, ids = patched("llama", scheme), tokens()
    expected = logits(model, ids)
    model.set_attn_implementation(backend)
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_agrees_at_several_lengths():
    model = patched("mistral", NORMED, num_hidden_layers=1)
    model.set_attn_implementation("eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (16, 21):
        ids = tokens(length=length)
        torch.testing.assert_close(logits(compiled, ids, use_cache=False), logits(model, ids, use_cache=False))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mistral"])
def test_a_cache_left_padding_and_packing_count_the_tokens_that_a_query_sees(model_type):
    model, ids = patched(model_type, NORMED), tokens(rows=1)
    full = logits(model, ids)
    with torch.no_grad():
        first = model(input_ids=ids[:, :9], use_cache=True)
        rest = model(input_ids=ids[:, 9:], **{CACHE: first[CACHE]})
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), full, rtol=1e-4, atol=1e-5)
    padded = torch.cat([ids.new_full((1, 5), 3), ids], 1)
    mask = torch.ones_like(padded)
    mask[:, :5] = 0
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    found = logits(model, padded, attention_mask=mask, position_ids=places)[:, 5:]
    torch.testing.assert_close(found, full, rtol=1e-4, atol=1e-5)
    packed, places = torch.cat([ids, ids], 1), torch.arange(16).repeat(2)[None]
    found = logits(model, packed, position_ids=places, use_cache=False)
    torch.testing.assert_close(found[:, 16:], full, rtol=1e-4, atol=1e-5)


def test_generation_gives_the_tokens_of_full_passes():
    model, ids = patched("llama", NORMED), tokens(rows=1, length=5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(ids, **options)
    assert torch.equal(found, model.generate(ids, cache_implementation="static", **options))
    for length in range(5, 11):
        assert logits(model, found[:, :length])[0, -1].argmax() == found[0, length]
    draft = patched("llama", NORMED, seed=1)
    assert torch.equal(found, model.generate(ids, assistant_model=draft, **options))


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_generation_does_not_count_padding(way):
    model, rows = patched("llama", NORMED), tokens(length=9)
    mask = torch.ones_like(rows)
    mask[0, :4] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **way}
    found = model.generate(rows.masked_fill(mask == 0, 0), attention_mask=mask, **options)
    for row, begin in zip(range(2), (4, 0), strict=True):
        alone = model.generate(rows[row : row + 1, begin:], **options)
        assert torch.equal(found[row : row + 1, begin:], alone)


def test_a_checkpoint_keeps_it_and_others_have_no_such_key(tmp_path):
    model, ids = patched("llama", NORMED), tokens()
    model.save_pretrained(tmp_path / "scaled")
    assert json.loads((tmp_path / "scaled" / "config.json").read_text())["qk_norm"]["length_scale"] == LENGTH
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "scaled").eval()
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert "length_scale" not in SCHEMES["qk_norm_cap"].to_dict()
    with pytest.raises(ValueError, match="length_scale=6 would be lost"):
        find_target(model.config)


def test_alone_it_is_a_scheme():
    model, ids = sharp_model("llama").eval(), tokens()
    before = logits(model, ids)
    qk.patch_model(model, ALONE)
    assert model.config.model_type == "qknorm_llama"
    assert not torch.allclose(logits(model, ids), before, atol=1e-3)
    torch.testing.assert_close(logits(qk.unpatch_model(model), ids), before)


def test_a_blend_brings_it_in():
    model, ids = sharp_model("llama").eval(), tokens()
    before = logits(model, ids)
    qk.patch_model(model, dataclasses.replace(NORMED, softcap=None))  # by the same backend
    whole = logits(model, ids)
    qk.set_blend(model, 0.0)
    assert torch.equal(logits(model, ids), before)
    qk.set_blend(model, 0.5)
    assert not torch.allclose(logits(model, ids), before, atol=1e-3)
    qk.set_blend(model, 1.0)
    assert torch.equal(logits(model, ids), whole)
    with pytest.raises(ValueError, match="a blend can't bring in length_scale=6 without a norm"):
        qk.set_blend(qk.patch_model(sharp_model("llama"), ALONE), 0.0)


def test_the_bound_holds_up_to_the_last_position():
    scheme = dataclasses.replace(SCHEMES["qk_norm"], length_scale=LENGTH)
    model = patched("llama", scheme, max_position_embeddings=36)
    plain = patched("llama", SCHEMES["qk_norm"], max_position_embeddings=36)
    for bound, half in zip(logit_bounds(model).values(), logit_bounds(plain).values(), strict=True):
        assert bound == pytest.approx(2 * half)


def test_gradients_reach_all_but_the_first_query():
    model = patched("llama", ALONE).train()
    layer = next(iter(patched_layers(model).values()))
    hidden = torch.randn(1, 8, model.config.hidden_size, requires_grad=True)
    places = model.model.rotary_emb(hidden, torch.arange(8)[None])
    queries: list[torch.Tensor] = []
    layer.q_proj.register_forward_hook(lambda _, __, out: (out.retain_grad(), queries.append(out))[0])
    layer(hidden, None, places, position_ids=torch.arange(8)[None])[0].square().sum().backward()
    sizes = queries[0].grad.abs().sum(-1)[0]
    assert sizes[0] == 0
    assert bool((sizes[1:] > 0).all())
    with pytest.raises(ValueError, match="length_scale needs position_ids"):
        layer(hidden, None, places)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("gpt_oss", "also sees the attention sink"),
        ("ministral3", "scales its queries by their position itself"),
        ("gpt_bigcode", "get no position_ids"),
        ("vit", "its queries see all tokens"),
    ],
)
def test_refusals(model_type, why):
    assert why in str(FAMILIES[model_type].refusal(copy.deepcopy(tiny_model("llama").config), ALONE))


@pytest.mark.parametrize("value", [1, 0, -3, 2.0, True, "256", 2**31])
def test_impossible_lengths(value):
    with pytest.raises(ValueError, match=r"Scheme\(length_scale=.*2 to 2147483647, or None"):
        Scheme(length_scale=value)


@pytest.mark.parametrize("model_type", [name for name in known_families() if FAMILIES[name].causal is True])
def test_queries_see_as_many_keys_as_positions_and_window_say(model_type):
    """In every family that is not refused."""
    family = FAMILIES[model_type]
    if family.style.no_length_scale:
        pytest.skip("refused")
    model = tiny_model(model_type)
    check_scheme(model_type, model.config, ALONE)
    layers = patched_layers(qk.patch_model(model, ALONE).eval())
    counts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def count(layer: Any, q: torch.Tensor, k: torch.Tensor, v: Any, mask: Any, options: dict[str, Any]) -> None:
        seen = _keys_seen(q, visible_keys(layer, q, k, mask, options, None))
        counts.append((seen[0, 0], (options["position_ids"][0] + 1).clamp_max(layer.window or q.shape[2])))

    for layer in layers.values():
        assert not hasattr(layer, "sinks")
        layer.observers = (count,)
    assert torch.isfinite(logits(model, tokens(length=40))).all()
    assert len(counts) >= len(layers)
    for seen, expected in counts:
        assert torch.equal(seen, expected)
