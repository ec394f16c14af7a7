"""Norms of latent attention (Han et al. 2026): the formula, the cache, refused schemes, and the package's tools."""

import copy
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_qknorm import FAMILIES, SCHEMES, QKClip, Scheme, calibrate, patch_model
from hf_qknorm.families import known_families
from hf_qknorm.measure.bounds import norm_limits
from hf_qknorm.measure.logit_statistics import logit_statistics
from hf_qknorm.model.attention import QKNormAttention, head_norms, patched_layers
from hf_qknorm.model.tensor_parallel import plan_norms
from qknorm_tests.tables import assert_near, make_batch, random_tokens, randomise, sharp_model

LATENT = [model_type for model_type in known_families() if FAMILIES[model_type].latent]
NORMS = {"q_norm", "q_rope_norm", "k_norm", "k_rope_norm"}
RMS = Scheme(q="rms", k="rms")


def made(model_type: str) -> PreTrainedModel:
    """A patched model with random gains."""
    return randomise(patch_model(sharp_model(model_type), RMS)).eval()


def first_layer(model: PreTrainedModel) -> QKNormAttention:
    return next(iter(patched_layers(model).values()))


@contextmanager
def attended(layer: QKNormAttention):
    """The layer's arguments, and the heads that its attention function gets, of the passes in the block."""
    seen = SimpleNamespace()

    def arguments(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.positions = kwargs.get("position_embeddings")
        seen.hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    def heads(_: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> None:
        seen.q, seen.k, seen.v = q, k, v

    hook = layer.register_forward_pre_hook(arguments, with_kwargs=True)
    layer.observers += (heads,)
    yield seen
    hook.remove()
    del layer.observers


def rms_normed(x: Tensor, gain: Tensor) -> Tensor:
    """γ∘x / rms(x) of x `[B, H, T, D]`."""
    return gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("model_type", LATENT)
@torch.no_grad()
def test_a_layer_computes_the_formula(model_type):
    """q = [norm(q₁), RoPE(norm(q₂))] and k = [norm(U·c), RoPE(norm(r))], each with its own gain."""
    model = made(model_type)
    layer = first_layer(model)
    assert head_norms(layer).keys() == NORMS
    with attended(layer) as seen:
        model(**make_batch("plain", labels=False), use_cache=False)
    gains = {name: norm.weight for name, norm in head_norms(layer).items()}
    style, width = layer.family.style, layer.qk_nope_head_dim
    q, latent, turned, *_ = (x.transpose(1, 2) for x in style.project(layer, seen.hidden)[:3])
    up = layer.kv_b_proj.weight.view(-1, width + layer.v_head_dim, layer.kv_lora_rank)[:, :width]
    plain = rms_normed(torch.einsum("hdr,btr->bhtd", up, latent[:, 0]), gains["k_norm"])
    queries = [rms_normed(q[..., :width], gains["q_norm"]), rms_normed(q[..., width:], gains["q_rope_norm"])]
    turned = rms_normed(turned, gains["k_rope_norm"])
    kept = {name: getattr(layer, name) for name in ("modelling", "config", "qk_nope_head_dim", "qk_rope_head_dim")}
    own = SimpleNamespace(**kept, normed=lambda name, x: x)
    q, _, turned = style.rotate(own, torch.cat(queries, -1), latent, turned, seen.positions)
    k = torch.cat([plain, turned.expand(-1, plain.shape[1], -1, -1)], -1)
    assert_near(seen.q, q, 1e-6, "queries")
    assert_near(seen.k, k, 1e-6, "keys")


@pytest.mark.parametrize("model_type", LATENT)
@torch.no_grad()
def test_the_cache_holds_what_it_held_before(model_type):
    """The latents of the first layer to the bit, and keys of the same shape, which all heads share."""
    model = sharp_model(model_type).eval()
    plain = copy.deepcopy(model)
    randomise(patch_model(model, RMS))
    caches = [m(**make_batch("plain", labels=False), use_cache=True).past_key_values for m in (plain, model)]
    before, after = (cache.layers[first_layer(model).layer_idx] for cache in caches)
    assert after.keys.shape == before.keys.shape
    assert after.values.shape == before.values.shape
    if first_layer(model).layer_idx == 0:
        assert torch.equal(after.keys, before.keys)
    assert not torch.allclose(after.values, before.values)


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (SCHEMES["henry"], "one gain a layer can't weigh them"),
        (SCHEMES["qkv_norm"], r"pre_norm=False\) into these projections is not supported"),
    ],
    ids=["henry", "qkv_norm"],
)
def test_other_schemes_are_refused_with_the_reason(scheme, reason):
    model = sharp_model("youtu")
    with pytest.raises(ValueError, match=reason):
        patch_model(model, scheme)
    assert not patched_layers(model)


@torch.no_grad()
def test_the_heads_have_one_dtype_under_autocast():
    model = randomise(patch_model(sharp_model("deepseek_v3"), RMS))
    with attended(first_layer(model)) as seen, torch.autocast("cpu", torch.bfloat16):
        model(**make_batch("plain", labels=False))
    assert seen.q.dtype == seen.k.dtype == seen.v.dtype


@pytest.mark.parametrize("gain", ["shared", "per_head"])
def test_the_norm_of_a_shared_key_is_replicated_in_tensor_parallel_plans(gain):
    model = patch_model(sharp_model("deepseek_v2"), Scheme(q="rms", k="rms", gain=gain))
    plan_norms(model)
    entries = {key.partition("self_attn.")[2]: style for key, style in model._tp_plan.items() if "_norm" in key}
    all_reduced = "replicated_with_grad_allreduce"
    heads = {f"{name}.weight" if gain == "per_head" else name for name in NORMS - {"k_rope_norm"}}
    shared = "k_rope_norm.weight" if gain == "per_head" else "k_rope_norm"
    assert entries["k_rope_norm"] == all_reduced or entries[shared] == all_reduced
    assert {entries[name] for name in heads} == {"colwise" if gain == "per_head" else all_reduced}


@torch.no_grad()
def test_the_worst_input_reaches_the_bound():
    """Both parts of queries and keys lie along their largest gains, at position 0, where RoPE turns nothing."""
    model = patch_model(sharp_model("youtu"), RMS).double()
    for layer in patched_layers(model).values():
        for norm, gain in zip(head_norms(layer).values(), (2.0, 3.0, 5.0, 7.0), strict=True):
            norm.weight.fill_(0.5)[0] = gain
        spiked(layer.q_b_proj, layer.qk_head_dim, layer.qk_nope_head_dim)
        spiked(layer.kv_b_proj, layer.qk_nope_head_dim + layer.v_head_dim)
        spiked(layer.kv_a_proj_with_mqa, layer.kv_lora_rank + layer.qk_rope_head_dim, layer.kv_lora_rank)
    with logit_statistics(model) as seen:
        model(input_ids=torch.full((1, 1), 5))
    assert len(seen) == len(limits := norm_limits(model))
    for name, limit in limits.items():
        assert limit["bound"] == pytest.approx((2 * 3 * 16 + 5 * 7 * 8) * 24**-0.5)
        assert float(seen[name].max_logit.max()) == pytest.approx(limit["bound"], rel=1e-5)
        assert (limit["gain_q"], limit["gain_k"]) == (5.0, 7.0)


def spiked(projection: torch.nn.Module, stride: int, *places: int) -> None:
    """Make a projection return a large number at each `stride`-th output, and at `places` after it; 0 elsewhere."""

    def replace(_: Any, __: Any, out: Tensor) -> Tensor:
        spike = torch.zeros(stride, dtype=out.dtype)
        spike[[0, *places]] = 1e3
        return spike.repeat(out.shape[-1] // stride).expand_as(out)

    projection.register_forward_hook(replace)


def test_calibration_keeps_the_predictions():
    model = patch_model(sharp_model("deepseek_v3"), RMS)
    report = calibrate(model, [random_tokens(2, 48, seed) for seed in range(12)], knee=4.0)
    assert report.chosen.kl < 0.15 * report.ones.kl
    assert all(layer.after.bound is not None for layer in report.layers.values())


@pytest.mark.parametrize(
    ("scheme", "reason"), [(RMS, "norms its queries and keys"), (Scheme(q="rms"), "norms its queries: scaling")]
)
def test_clipping_is_refused_where_it_does_nothing(scheme, reason):
    with pytest.raises(ValueError, match=reason):
        QKClip(patch_model(sharp_model("deepseek_v3"), scheme))


def test_clipping_with_normed_keys_scales_the_queries():
    model = randomise(patch_model(sharp_model("deepseek_v3"), Scheme(k="rms")))
    before = watched(model)
    clip = QKClip(model, threshold=0.1)
    model(input_ids=random_tokens(2, 48))
    name, factors = next(iter(clip.step().items()))  # a later layer gets other inputs, too
    clip.remove()
    assert (factors < 1).any()
    torch.testing.assert_close(watched(model)[name], before[name] * factors)


@torch.no_grad()
def watched(model: PreTrainedModel) -> dict[str, Tensor]:
    """The largest |logit| of each head."""
    with logit_statistics(model) as seen:
        model(input_ids=random_tokens(2, 48))
    return {name: layer.max_logit for name, layer in seen.items()}
