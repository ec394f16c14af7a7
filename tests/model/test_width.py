"""Norms over all heads: beside transformers' own of OLMo 2 and PyTorch's LayerNorm, checkpoints, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tables import as_loaded, make_batch, randomise, sharp_model
from torch import nn
from transformers import AutoModelForCausalLM, Olmo2Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2RMSNorm

from hf_qknorm import SCHEMES, Scheme, patch_model, unpatch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.knees import beyond_knee
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.stats.bounds import logit_bound
from hf_qknorm.stats.measure import evaluate, layer_reports

HEADS, DIM = 3, 16
WIDE = Scheme(q="rms", k="rms", width="all")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rms_is_olmo_2s_norm_to_the_bit():
    ours, theirs = HeadNorm("rms", replace(WIDE, eps=1e-5), HEADS, DIM), Olmo2RMSNorm(HEADS * DIM, eps=1e-5)
    assert ours.weight.shape == theirs.weight.shape
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.copy_(randn(HEADS * DIM, seed=1)))
    x = randn(2, 5, HEADS, DIM)
    for heads in (x, x.transpose(0, 1)):  # another memory layout, too
        assert torch.equal(ours(heads), theirs(heads.flatten(-2)).view_as(heads))


def test_layer_is_pytorchs_layer_norm_over_all_channels():
    ours = HeadNorm("layer", Scheme(q="layer", width="all", eps=1e-5), HEADS, DIM)
    theirs = nn.LayerNorm(HEADS * DIM)
    with torch.no_grad():
        for own, other, seed in ((ours.weight, theirs.weight, 1), (ours.bias, theirs.bias, 2)):
            other.copy_(own.copy_(randn(HEADS * DIM, seed=seed)))
    x = randn(2, 5, HEADS, DIM)
    torch.testing.assert_close(ours(x), theirs(x.flatten(-2)).view_as(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("gain", "shape"), [("shared", (HEADS * DIM,)), ("scalar", (1,)), ("none", None)])
def test_gains_have_one_entry_for_each_channel_of_every_head(gain, shape):
    norm = HeadNorm("rms", replace(WIDE, gain=gain), HEADS, DIM)
    assert (None if norm.weight is None else tuple(norm.weight.shape)) == shape


def test_a_patched_layer_computes_what_olmo_2s_attention_does():
    model = as_loaded(randomise(patch_model(sharp_model("llama"), replace(WIDE, eps=1e-5))))
    layer = patched_layers(model)["model.layers.0.self_attn"]
    heads, heads_kv, head_dim = layer.family.style.heads(layer)
    assert heads > heads_kv
    config = Olmo2Config(
        hidden_size=model.config.hidden_size, num_attention_heads=heads, num_key_value_heads=heads_kv, rms_norm_eps=1e-5
    )
    config._attn_implementation = "eager"
    model.set_attn_implementation("eager")
    theirs = Olmo2Attention(config, layer_idx=0)
    theirs.load_state_dict(layer.state_dict())
    hidden = randn(2, 7, config.hidden_size)
    places = model.model.rotary_emb(hidden, torch.arange(7)[None])
    mask = torch.full((7, 7), torch.finfo(torch.float32).min).triu(1)[None, None]
    torch.testing.assert_close(layer(hidden, mask, places)[0], theirs(hidden, places, mask)[0], rtol=1e-5, atol=1e-6)


def test_one_heads_scale_changes_the_other_heads():
    """By which a norm per head and one over all heads differ."""
    x = randn(1, 1, HEADS, DIM)
    louder = x.clone()
    louder[:, :, 0] *= 10
    alone, together = (HeadNorm("rms", replace(WIDE, width=width), HEADS, DIM) for width in ("head", "all"))
    assert torch.equal(alone(x)[:, :, 1:], alone(louder)[:, :, 1:])
    assert (together(louder)[:, :, 1:].norm() < 0.5 * together(x)[:, :, 1:].norm()).all()


def test_one_head_may_reach_the_bound():
    model = patch_model(sharp_model("llama"), replace(WIDE, knee=4.0))
    layer = next(iter(patched_layers(model).values()))
    with torch.no_grad():
        for norm, heads in ((layer.q_norm, 4), (layer.k_norm, 2)):
            norm.weight.copy_(torch.linspace(1.0, 2.0, norm.channels))
            assert norm.channels == heads * norm.head_dim
        q, k = (torch.zeros(1, 1, heads, layer.q_norm.head_dim) for heads in (4, 2))
        q[..., -1, -1] = k[..., -1, -1] = 1e4
        reached = layer.logit_scale * float((layer.q_norm(q)[0, 0, -1] * layer.k_norm(k)[0, 0, -1]).sum())
        noise = layer.q_norm(1e4 * randn(100, 1, 4, 16)), layer.k_norm(1e4 * randn(100, 1, 2, 16, seed=1))
    bound = logit_bound(layer)
    assert 0.99 * bound <= reached <= bound * (1 + 1e-5)
    assert layer.logit_scale * noise[0].norm(dim=-1).max() * noise[1].norm(dim=-1).max() < bound


def test_statistics_are_those_of_each_head():
    model = patch_model(sharp_model("llama"), replace(WIDE, knee=1.0))
    found = evaluate(model, [make_batch("plain", labels=False)], cap=50.0, compared=False).after
    report = next(iter(layer_reports(model, {}, found).values()))
    assert len(report.gain_q) == len(report.after.rms_q) == len(report.after.beyond_q) == 4
    assert len(report.gain_k) == len(report.after.rms_k) == len(report.after.beyond_k) == 2
    norm = next(iter(patched_layers(model).values())).q_norm
    assert torch.equal(beyond_knee(norm, 9 * torch.eye(4)[:1].view(1, 4, 1).expand(1, 4, 16)), torch.ones(1, 4) > 0)
    norm.weight.data[:16] = 3.0
    assert layer_reports(model, {}, found)["model.layers.0.self_attn"].gain_q == pytest.approx((3.0, 1.0, 1.0, 1.0))


def test_a_checkpoint_gives_the_model_back_and_another_width_is_refused(tmp_path):
    model, batch = as_loaded(randomise(patch_model(sharp_model("llama"), WIDE))), make_batch("left", labels=False)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.scheme == WIDE
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["qk_norm"].pop("width") == "all"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"another shape in the weights .*is \[32\], expected \[16\]"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_other_schemes_have_no_such_key():
    assert all("width" not in scheme.to_dict() for scheme in SCHEMES.values())


def test_parallel_ranks_gather_the_heads_as_in_olmo_2():
    model = sharp_model("llama")
    plan = dict(model.tp_plan)
    patch_model(model, WIDE)
    own = {key.rpartition(".")[2]: style for key, style in model.tp_plan.items() if ".self_attn." in key}
    theirs = {key.rpartition(".")[2]: style for key, style in Olmo2Config().base_model_tp_plan.items() if "attn" in key}
    assert own == theirs
    unpatch_model(model)
    assert dict(model.tp_plan) == plan


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"q": "rms", "width": "heads"}, r'Scheme\(width=\'heads\'\) .* one of "head", "all"'),
        ({"q": "rms", "width": None}, "width=None"),
        ({"width": "all"}, r'width=\'all\'\) is not possible: expected "head" unless the norms .* "rms", "layer"'),
        ({"q": "l2", "k": "rms", "width": "all"}, "one that gives length 1 is per head"),
        ({"q": "rms", "gain": "per_head", "width": "all"}, 'another gain with width="all"'),
    ],
)
def test_impossible_schemes(fields, message):
    with pytest.raises(ValueError, match=message):
        Scheme(**fields)
