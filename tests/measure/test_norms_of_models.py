"""Models born with norms of queries and keys: bound, gains and logits, without patching them."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

from hf_qknorm import FAMILIES, inspect_model, patch_model
from hf_qknorm.families import known_families
from hf_qknorm.measure.bounds import norm_limits
from hf_qknorm.measure.logit_statistics import logit_statistics, watchable_layers
from hf_qknorm.model.attention import QKNormAttention, patched_layers
from qknorm_tests.slow import slow_but
from qknorm_tests.tables import fingerprint, random_tokens, sharp_model

TOKENS = random_tokens(2, 20)
BORN = [model_type for model_type in known_families() if FAMILIES[model_type].own_norms]
CENTRED = ("cohere", "persimmon", "phi", "stablelm")  # their norms are LayerNorms
# A stored 0 is a gain of 1
PLUS_ONE = ("gemma3_text", "minimax_m3_vl_text", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text")
BOUNDED = [model_type for model_type in BORN if model_type != "zaya"]  # one module norms its queries and keys together
FEW = {
    FAMILIES[model_type].style: model_type for model_type in BOUNDED
}.values()  # one of each style; the others are slow


def born(model_type: str) -> nn.Module:
    """A small model of the type with its own norms switched on, and nothing that clips its projections."""
    switch = FAMILIES[model_type].own_norms
    settings = {switch: True} if isinstance(switch, str) else {}
    return sharp_model(model_type, **settings | ({"clip_qkv": None} if model_type == "olmoe" else {}))


def own_norms(layer: QKNormAttention) -> list[nn.Module]:
    """The layer's norms of queries and keys that are there."""
    return [layer._modules[name] for name in layer.family.style.own_norms if layer._modules.get(name) is not None]


def set_gains(model: nn.Module, first: float, others: float) -> None:
    """Set the stored gains of the first channel of each norm, and of the others; biases become 0."""
    with torch.no_grad():
        for layer in patched_layers(model).values():
            for parameters in ([*norm.named_parameters()] for norm in own_norms(layer)):
                for name, parameter in parameters:
                    parameter.fill_(0.0 if name.endswith("bias") else others)
                if parameters:
                    parameters[0][1].view(-1)[0] = first


def force_outputs(layer: QKNormAttention, raw: torch.Tensor) -> None:
    """Make the projections of queries and keys return `raw` `[D]` as the first head, and as others for a LayerNorm."""
    dim = layer.family.style.heads(layer)[2]
    alternating = bool((raw < 0).any())

    def replace(_: nn.Module, __: tuple, out: torch.Tensor) -> torch.Tensor:
        if alternating:
            return raw.repeat(out.shape[-1] // dim).expand_as(out)
        starts = [0, dim] if len(layer.family.style.weights) == 1 else [0]
        forced = torch.zeros_like(out)
        for start in starts:
            forced[..., start : start + dim] = raw
        return forced

    for name in layer.family.style.weights[:2]:
        if getattr(layer, name, None) is not None:
            layer.get_submodule(name).register_forward_hook(replace)


@pytest.mark.parametrize("model_type", slow_but(FEW, BOUNDED))
def test_the_worst_input_reaches_the_bound(model_type):
    """The first channel has the largest gain: queries and keys along it, of one token, have the largest logit."""
    centred = model_type in CENTRED
    model = patch_model(born(model_type), "none")
    set_gains(model, *((-1.7, -1.7) if centred else (2.5, 0.3)))
    layers = patched_layers(model)
    for layer in layers.values():
        dim = layer.family.style.heads(layer)[2]
        spike = torch.eye(dim)[0]
        force_outputs(layer, 1e3 * (torch.tensor([1.0, -1.0]).repeat(dim // 2) if centred else spike))
    with torch.no_grad(), logit_statistics(model) as seen:
        model(input_ids=TOKENS[:1, :1])
    bounds = {name: limits["bound"] for name, limits in norm_limits(model).items()}
    assert any(bound is not None for bound in bounds.values())
    for name, layer in layers.items():
        if bounds[name] is None:  # Llama 4: no norm in a layer without RoPE
            assert (model_type, own_norms(layer)) == ("llama4_text", [])
            continue
        scale = layer.family.style.query_scale(layer)  # Beam's last position has a larger one than the first
        assert float(seen[name].max_logit.max()) * scale == pytest.approx(bounds[name], rel=3e-3)


@pytest.mark.parametrize("model_type", slow_but(FEW, BORN))
def test_an_unpatched_model_is_watched_and_keeps_below_its_bound(model_type):
    model = born(model_type)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad(), watchable_layers(model) as layers:
        for layer in layers.values():
            for norm in own_norms(layer):
                for parameter in norm.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator))
    before = fingerprint(model)
    found = inspect_model(model, [TOKENS])
    assert fingerprint(model) == before
    with torch.no_grad(), logit_statistics(model) as seen:
        logits = model(input_ids=TOKENS).logits
        copied = copy.deepcopy(model)
    assert fingerprint(model) == before
    with torch.no_grad():
        assert torch.equal(logits, model(input_ids=TOKENS).logits)
        assert torch.equal(logits, copied(input_ids=TOKENS).logits)
    assert set(seen) == set(found.layers)
    for name, layer in found.layers.items():
        assert layer.max_logit == pytest.approx(seen[name].max_logit.tolist(), rel=1e-4)
        assert max(layer.max_logit) <= (layer.bound or torch.inf) * (1 + 1e-5)
    patch_model(model, "soft_cap")
    for name, limits in norm_limits(model).items():
        assert limits == {key: getattr(found.layers[name], key) for key in ("gain_q", "gain_k", "bound")}
        assert (None in (limits["gain_q"], limits["gain_k"])) == (limits["bound"] is None)


@pytest.mark.parametrize("model_type", slow_but(FEW, BOUNDED))
def test_the_largest_gain_is_that_of_the_stored_weights(model_type):
    model = patch_model(born(model_type), "none")
    set_gains(model, -3.0, 0.5)
    if not any([*norm.parameters()] for layer in patched_layers(model).values() for norm in own_norms(layer)):
        pytest.skip("its norms have no gains")
    largest = 2.0 if model_type in PLUS_ONE else 3.0
    for limits in norm_limits(model).values():
        assert (limits["gain_q"], limits["gain_k"]) == pytest.approx((largest, largest))


@pytest.mark.parametrize("model_type", ["qwen3", "olmo2", "stablelm", "llama"])
def test_offloaded_norms_have_the_same_bound(model_type):
    model, offloaded = (born(model_type) if model_type != "llama" else sharp_model("llama") for _ in range(2))
    scheme = "qk_norm" if model_type == "llama" else "none"
    limits = norm_limits(patch_model(model, scheme))
    cpu_offload(patch_model(offloaded, scheme), execution_device="cpu")
    assert {p.device.type for p in offloaded.parameters()} == {"meta"}
    assert all(found == pytest.approx(limits[name]) for name, found in norm_limits(offloaded).items())
    assert {p.device.type for p in offloaded.parameters()} == {"meta"}


def test_a_model_whose_attention_another_tool_has_replaced_is_not_watched():
    model = born("qwen3")
    layer = model.model.layers[0].self_attn
    layer.forward = layer.forward
    with pytest.raises(ValueError, match="another tool has replaced the forward"), logit_statistics(model):
        pass
    with pytest.raises(ValueError, match="Linear has no attention module"), logit_statistics(nn.Linear(2, 2)):
        pass
