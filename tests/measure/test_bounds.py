"""The bound on a layer's logits: no input exceeds it, and some inputs come close."""

import math

import pytest
import torch
from torch import Tensor

from hf_qknorm import FAMILIES, SCHEMES, Scheme, patch_model
from hf_qknorm.families import known_families
from hf_qknorm.measure.bounds import norm_limits, rotary_scale, worst_bound
from hf_qknorm.measure.logit_statistics import logit_statistics
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.model.norms import HeadNorm
from qknorm_tests.slow import slow_but
from qknorm_tests.tables import random_tokens, sharp_model
from qknorm_tests.tiny import tiny_config, tiny_model

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
TOKENS = random_tokens(2, 20)


def patched(scheme: Scheme, family: str = "llama", knee: float = 0.0, **settings) -> torch.nn.Module:
    """A model with the scheme, random gains and biases, and different mean powers for a knee."""
    model = patch_model(sharp_model(family, **settings), scheme)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, HeadNorm)):
            for parameter in norm.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            if knee:
                norm.set_shape(norm.rounded(knee, 0.3, 2.0))
    return model


def bounds(model: torch.nn.Module) -> list[float | None]:
    """The bound of each layer."""
    return [limits["bound"] for limits in norm_limits(model).values()]


ALTERNATING = torch.tensor([1.0, -1.0]).repeat(8)
FIRST = torch.eye(16)[0]

FALLING = torch.linspace(3.0, 1.0, 16)


@pytest.mark.parametrize(
    ("norm", "p", "direction", "gain", "bias"),
    [
        ("rms", 2.0, FIRST, FALLING, None),
        ("rms", 2.0, FIRST, FALLING, 2.0 * FIRST),
        ("l2", 2.0, FIRST, FALLING, None),
        ("lp", 1.5, FIRST, FALLING, None),
        ("layer", 2.0, ALTERNATING, torch.full((16,), -1.7), -0.5 * ALTERNATING),
        ("lp", 3.0, ALTERNATING, torch.full((16,), -1.7), None),
        ("lp", 12.0, torch.linspace(3.0, 1.0, 16).pow(0.2), FALLING, None),  # x ∝ g^(2/(p − 2))
    ],
)
@pytest.mark.parametrize("knee", [0.0, 4.0])
def test_some_vector_reaches_the_bound(norm, p, direction, gain, bias, knee):
    """A vector in the channel of the largest gain reaches it; for p > 2 a vector with all channels. None exceeds it."""
    model = patched(Scheme(q=norm, k=norm, p=p, bias=bias is not None), knee=knee)
    layer = next(iter(patched_layers(model).values()))
    assert layer.family.style.heads(layer)[2] == 16
    random = torch.randn(200, 1, 1, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for part in (layer.q_norm, layer.k_norm):
            part.weight.copy_(gain)
            if part.bias is not None:
                part.bias.copy_(bias)
        x = 1e4 * torch.cat([direction.view(1, 1, 1, -1), random])
        found = layer.logit_scale * (layer.q_norm(x) * layer.k_norm(x)).sum(-1)
    bound = bounds(model)[0]
    assert 0.99 * bound <= float(found[0]) == float(found.max()) <= bound * (1 + 1e-5)


def test_each_key_head_meets_its_group_of_query_heads():
    model = patch_model(sharp_model("llama", num_hidden_layers=1), Scheme(q="rms", k="rms", gain="per_head"))
    layer = model.model.layers[0].self_attn
    plain = worst_bound(model)
    for norm, gains in ((layer.q_norm, (1.0, 2.0, 3.0, 4.0)), (layer.k_norm, (10.0, 1.0))):
        norm.weight.data[:] = torch.tensor(gains)[:, None]
    assert worst_bound(model) == pytest.approx(20 * plain)


def test_the_largest_gains_have_no_sign():
    model = patch_model(sharp_model("llama", num_hidden_layers=1), Scheme(q="rms", k="rms"))
    for norm, gain in zip((m for m in model.modules() if isinstance(m, HeadNorm)), (-3.0, 2.0), strict=True):
        torch.nn.init.constant_(norm.weight, gain)
    assert [*norm_limits(model).values()] == [{"gain_q": 3.0, "gain_k": 2.0, "bound": worst_bound(model)}]


def largest(model: torch.nn.Module, **inputs: Tensor) -> dict[str, float]:
    """The largest |logit| of each layer."""
    with torch.no_grad(), logit_statistics(model) as watched:
        model(**inputs)
    return {name: float(seen.max_logit.max()) for name, seen in watched.items()}


@pytest.mark.parametrize("family", ["llama", "mistral", "phi3", "gpt2", "gpt_neox", "gemma2", "opt", "granite"])
def test_logits_of_models_stay_below_the_bound(family):
    model = patched(Scheme(q="layer", k="lp", p=3.0, gain="per_head", bias=True), family, 2.0)
    seen = largest(model, input_ids=TOKENS)
    for logit, bound in zip(seen.values(), bounds(model), strict=True):
        assert 0 < logit < bound
    assert worst_bound(model) == max(bounds(model))


def longrope(head_dim: int) -> dict:
    """LongRoPE's settings for a head."""
    return LONG | {"short_factor": [1.0] * (head_dim // 2), "long_factor": [4.0] * (head_dim // 2)}


def config_with(family: str, rope: dict) -> dict | None:
    """Settings that give a tiny model of the family other rotary embeddings; None if it has none to change."""
    known = getattr(tiny_config(family), "rope_parameters", None)
    if not known or FAMILIES[family].refusal(tiny_config(family), SCHEMES["qk_norm"]):
        return None
    if "rope_type" in known:
        return {"rope_parameters": {**known, **rope}}
    return {"rope_parameters": {kind: old and {**old, **rope} for kind, old in known.items()}}


ROTATED = [
    family
    for family in known_families()
    if config_with(family, YARN)
    and family
    # an odd head dimension, angles within the layer, no maximum length, and no language model by themselves
    not in ("mimo_v2_flash", "moshi", "recurrent_gemma", "qwen2_vl_text", "qwen2_5_vl_text")
]

FEW = {FAMILIES[family].style: family for family in ROTATED}.values()  # one of each style; the others are slow


@pytest.mark.parametrize("family", slow_but({*FEW, "phi3", "phimoe", "llama4_text"}, ROTATED))
def test_rotary_scale_is_the_factor_in_cos_and_sin(family):
    """YaRN's factor, as in the cos and sin of each layer."""
    settings = config_with(family, YARN)
    if family in ("phi3", "phi4_multimodal"):
        settings = config_with(family, longrope(16)) | {"original_max_position_embeddings": 16}
    if family == "phimoe":
        settings["rope_parameters"] |= {"short_mscale": 1.1, "long_mscale": 1.3}
    model = patch_model(tiny_model(family, **settings), "none")
    scales: dict[str, float] = {}
    for name, layer in patched_layers(model).items():

        def note(_, __, kwargs, name=name):
            positions = kwargs.get("position_embeddings")
            if isinstance(positions, tuple):
                scales[name] = float((positions[0].square() + positions[1].square()).sqrt().max())
            elif positions is not None:  # Llama 4's are complex
                scales[name] = float(positions.abs().max())

        layer.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=TOKENS)
    assert max(scales.values()) > 1.1
    for name, layer in patched_layers(model).items():
        turned = name in scales and layer.family.style.rotates(layer)
        assert rotary_scale(layer) == pytest.approx(scales[name] if turned else 1.0, rel=1e-5)


@pytest.mark.parametrize("rope", ["yarn", "longrope"])
def test_the_bound_covers_scaled_rotary_embeddings(rope):
    model = tiny_model("llama")
    head_dim = model.config.head_dim
    scaled = YARN if rope == "yarn" else longrope(head_dim)
    plain, stretched = (
        patch_model(tiny_model("llama", initializer_range=0.2, rope_parameters=parameters), "qk_norm")
        for parameters in ({"rope_type": "default", "rope_theta": 1e4}, scaled)
    )
    factor = stretched.model.rotary_emb.attention_scaling
    assert factor > 1.1
    assert worst_bound(stretched) == pytest.approx(worst_bound(plain) * factor**2)
    shrunk = patch_model(tiny_model("llama", rope_parameters=scaled | {"attention_factor": 0.5}), "qk_norm")
    assert worst_bound(shrunk) == pytest.approx(worst_bound(plain))
    layer = stretched.model.layers[0].self_attn
    with torch.no_grad():  # all tokens have the same parallel query and key, which reach the bound at angle 0
        for projection in (layer.q_proj, layer.k_proj):
            projection.weight.zero_()
            projection.bias = torch.nn.Parameter(torch.ones(projection.out_features))
    assert largest(stretched, input_ids=TOKENS)["model.layers.0.self_attn"] == pytest.approx(bounds(stretched)[0])


@pytest.mark.parametrize("family", ["llama4_text", "ministral3"])
def test_the_bound_covers_queries_scaled_by_position(family):
    settings = {"use_qk_norm": False, "floor_scale": 4} if family == "llama4_text" else {}
    model = patch_model(tiny_model(family, **settings), "qk_norm")
    layers = patched_layers(model).values()
    scales = [layer.family.style.query_scale(layer) for layer in layers]
    assert max(scales) > 1.2
    length = model.config.max_position_embeddings
    for layer, scale in zip(layers, scales, strict=True):
        heads, heads_kv, head_dim = layer.family.style.heads(layer)
        q, k, v = (torch.ones(1, h, length, head_dim) for h in (heads, heads_kv, heads_kv))
        places = torch.arange(length)[None]
        positions = None
        if layer.family.style.rotates(layer):
            positions = model.model.rotary_emb(v, places)
        turned, *_ = layer.family.style.rotate(layer, q, k, v, positions, past_key_values=None, position_ids=places)
        longest = float(turned.norm(dim=-1).max()) / math.sqrt(head_dim)
        assert longest == pytest.approx(scale * rotary_scale(layer), rel=1e-5)


@pytest.mark.parametrize("scheme", ["soft_cap", "q_norm", "none", Scheme(k="rms")])
def test_without_both_norms_there_is_no_bound(scheme):
    model = patch_model(tiny_model("llama"), scheme)
    assert bounds(model) == [None, None]
    assert worst_bound(model) is None


def test_bypassed_norms_have_no_bound():
    model = patch_model(tiny_model("llama"), "qk_norm")
    assert worst_bound(model) == pytest.approx(math.sqrt(model.config.head_dim))
    with as_unpatched(model):
        assert worst_bound(model) is None
