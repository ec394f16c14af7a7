"""The parts of the projections are those of each head's queries and keys, for every style; gradients show it."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers.pytorch_utils import Conv1D

from hf_qknorm import FAMILIES, patch_model
from hf_qknorm.measure.head_weights import HeadWeights, attention_head_weights, sizes
from qknorm_tests.tables import Codes, causal_families, make_batch, sharp_model
from qknorm_tests.tiny import tiny_model

NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
STYLES = [*{FAMILIES[model_type].style: model_type for model_type in reversed(causal_families())}.values()]
VARIANTS = [("gpt_bigcode", {"multi_query": False}), ("deepseek_v3", {"q_lora_rank": None})]
OTHER_NORMS = ("bert", "cohere2", "dbrx", "gemma", "modernbert-decoder", "nemotron", "nemotron_h", "opt", "phi")
NONE_BEFORE = {"bert"}  # it is behind the layer before
SEVERAL = {"gemma3n_text", "gemma4_text", "longcat_flash"}  # attention layers to a decoder layer, or to a key
CASES = [*((model_type, {}) for model_type in STYLES), *VARIANTS]


def width_of(part: HeadWeights) -> int:
    """The number of the projection's inputs."""
    return int(part.weight.shape[0 if isinstance(part.projection, Conv1D) else 1])


def heads_made(model_type: str, layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The outputs of each part for x, `[B, T, heads, *]`, without the layer's own norms."""
    for name in NORMS:
        if getattr(layer, name, None) is not None:
            setattr(layer, name, nn.Identity())
    style, latent = FAMILIES[model_type].style, FAMILIES[model_type].latent
    if FAMILIES[model_type].own_norms is True:  # its own forward projects
        width = style.heads(layer)[2]
        made = {side: layer.get_submodule(part)(x) for side, part in zip("qk", style.weights, strict=False)}
        return {side: heads.unflatten(-1, (-1, width)) for side, heads in made.items()}
    q, k, v, *_ = style.project(layer, x)
    if not latent:
        return {"q": q, "k": k}
    width = layer.qk_nope_head_dim
    keys, _ = layer.expand_kv(k.transpose(1, 2), v.transpose(1, 2))
    made = {"uq": q[..., :width], "qr": q[..., width:], "uk": keys.transpose(1, 2)[..., :width], "dkv": k, "kr": v}
    return made | ({"dq": q.flatten(2).unsqueeze(2)} if getattr(layer, "q_a_proj", None) else {})


@pytest.mark.parametrize(("model_type", "settings"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_parts_are_the_rows_of_the_heads(model_type, settings):
    model = tiny_model(model_type, **settings).train(False)
    if any(getattr(layer, "is_kv_shared_layer", False) for layer in model.modules()):
        with pytest.raises(ValueError, match="has no k_proj: it attends to the keys of another layer"):
            attention_head_weights(model)
        return
    for name, parts in attention_head_weights(model).items():
        layer = model.get_submodule(name)
        x = torch.randn(2, 9, width_of(parts["q"] if "q" in parts else parts["dkv"]))
        made = heads_made(model_type, layer, x)
        assert set(made) == set(parts)
        for side, part in parts.items():
            assert made[side].shape[2] == part.heads
            for head, outputs in enumerate(part.outputs(x.device)):
                (grad,) = torch.autograd.grad(made[side][:, :, head].square().sum(), part.weight, retain_graph=True)
                moves = (grad.abs().sum(0 if isinstance(part.projection, Conv1D) else 1) > 0).nonzero().flatten()
                assert torch.equal(moves, outputs), f"{name} {side} head {head}"


@torch.no_grad()
@pytest.mark.parametrize("model_type", sorted({*STYLES, *OTHER_NORMS} - SEVERAL))
def test_the_norms_result_is_the_projections_input(model_type):
    model = tiny_model(model_type)
    parts = [part for layer in attention_head_weights(model).values() for part in layer.values()]
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    for module in {x for part in parts for x in (part.projection, part.norm.module) if x is not None}:
        module.register_forward_hook(lambda module, x, result: seen.update({module: (x[0], result)}))
    model(**make_batch("plain", labels=False))
    family = FAMILIES[model_type]
    unread = family.has_norms(model.config) or family.style.project_across is not None or model_type in NONE_BEFORE
    with_norm = [part for part in parts if part.norm.module is not None]
    assert bool(with_norm) is not unread
    assert len(with_norm) == len(parts) or unread or model_type == "modernbert-decoder"  # its first has an Identity
    for part in with_norm:
        assert torch.equal(seen[part.projection][0].flatten(), seen[part.norm.module][1].flatten())


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma", "gpt2", "llama", "nemotron", "olmo"])
def test_sizes_are_those_of_random_inputs(model_type):
    model = sharp_model(model_type)
    generator = torch.Generator().manual_seed(0)
    for p in (p for name, p in model.named_parameters() if "norm" in name or "ln_1" in name):
        p.add_(torch.randn(p.shape, generator=generator) * 0.5)
    for layer in attention_head_weights(model).values():
        for name, size in sizes(layer).items():
            part = layer[name]
            x = part.norm.module(torch.randn(4000, width_of(part), generator=generator))
            heads = part.projection(x)[:, part.outputs(x.device)]
            torch.testing.assert_close(size.inputs, x.square().mean().sqrt(), rtol=0.03, atol=0)
            torch.testing.assert_close(size.outputs, heads.square().sum(2).mean(0).sqrt(), rtol=0.06, atol=0)


@pytest.mark.parametrize(
    "model", [tiny_model("opt", do_layer_norm_before=False), patch_model(tiny_model("llama"), "qkv_norm")]
)
def test_a_norm_that_follows_or_is_removed_does_not_count(model):
    assert all(p.norm.module is None for parts in attention_head_weights(model).values() for p in parts.values())


def with_weight(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(64, 32)
    linear.weight = nn.Parameter(weight)
    return linear


@pytest.mark.parametrize(
    ("projection", "message"),
    [
        (nn.Bilinear(2, 2, 2), r"torch\.nn\.\S+\.Bilinear: expected torch's Linear"),
        (with_weight(torch.zeros(32 * 64)), r"Linear with a Parameter \[2048\] of torch.float32"),
        (with_weight(torch.zeros(32, 64).as_subclass(Codes)), r"Linear with a Codes .* do not quantise it"),
        (weight_norm(nn.Linear(64, 32)), r"ParametrizedLinear with a Tensor .* end parametrizations"),
    ],
)
def test_unknown_projections_are_refused(projection, message):
    model = sharp_model("llama")
    model.model.layers[1].self_attn.k_proj = projection
    with pytest.raises(ValueError, match=rf"model\.layers\.1\.self_attn\.k_proj is a \S*{message}"):
        attention_head_weights(model)


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="Linear has no attention layer of a known family"):
        attention_head_weights(nn.Linear(2, 2))
