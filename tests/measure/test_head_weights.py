"""The parts of the projections are those of each head's queries and keys, for every style; gradients show it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers.pytorch_utils import Conv1D

from hf_qknorm import FAMILIES
from hf_qknorm.measure.head_weights import attention_head_weights
from qknorm_tests.tables import Codes, causal_families, sharp_model
from qknorm_tests.tiny import tiny_model

NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
STYLES = [*{FAMILIES[model_type].style: model_type for model_type in reversed(causal_families())}.values()]
VARIANTS = [("gpt_bigcode", {"multi_query": False}), ("deepseek_v3", {"q_lora_rank": None})]
CASES = [*((model_type, {}) for model_type in STYLES), *VARIANTS]


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
    return {"uq": q[..., :width], "qr": q[..., width:], "uk": keys.transpose(1, 2)[..., :width]}


@pytest.mark.parametrize(("model_type", "settings"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_parts_are_the_rows_of_the_heads(model_type, settings):
    model = tiny_model(model_type, **settings).train(False)
    if any(getattr(layer, "is_kv_shared_layer", False) for layer in model.modules()):
        with pytest.raises(ValueError, match="has no k_proj: it attends to the keys of another layer"):
            attention_head_weights(model)
        return
    for name, parts in attention_head_weights(model).items():
        layer = model.get_submodule(name)
        first = parts["q"].projection if "q" in parts else layer.kv_a_proj_with_mqa
        x = torch.randn(2, 9, first.weight.shape[0 if isinstance(first, Conv1D) else 1])
        made = heads_made(model_type, layer, x)
        assert set(made) == set(parts)
        for side, part in parts.items():
            assert made[side].shape[2] == part.heads
            for head, outputs in enumerate(part.outputs(x.device)):
                (grad,) = torch.autograd.grad(made[side][:, :, head].square().sum(), part.weight, retain_graph=True)
                inputs = 0 if isinstance(part.projection, Conv1D) else 1
                moves = (grad.abs().sum(inputs) > 0).nonzero().flatten()
                assert torch.equal(moves, outputs), f"{name} {side} head {head}"


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
