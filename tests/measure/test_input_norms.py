"""The norm before attention is found in every model type, and sizes are those of vectors that arrive behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_qknorm import FAMILIES, patch_model
from hf_qknorm.measure.head_weights import attention_head_weights, attention_layers, sizes
from qknorm_tests.tables import causal_families, make_batch, sharp_model, swept
from qknorm_tests.tiny import tiny_model

# without a norm before attention: those of BERT's kind are behind the layer before
NONE = {
    "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roc_bert", "xlm-roberta",
    "xmod",
}  # fmt: skip
SCALED = {"falcon_h1", "longcat_flash"}  # multiply a norm's result by a constant


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_type" in metafunc.fixturenames:
        found = swept(metafunc.config)
        extra = {"bert", "cohere2", "dbrx", "gemma", "modernbert-decoder", "nemotron", "nemotron_h", "opt", "phi"}
        metafunc.parametrize("model_type", sorted({*found, *(extra & set(causal_families()))}))


def parts_of(model: nn.Module) -> dict[str, Any]:
    try:
        return attention_head_weights(model)
    except ValueError as error:
        pytest.skip(str(error))  # layers that share the keys of another


@torch.no_grad()
def test_the_norm_s_result_is_the_projection_s_input(model_type):
    model = tiny_model(model_type)
    parts = parts_of(model)
    has_norms = FAMILIES[model_type].has_norms(model.config)
    results: dict[Any, Tensor] = {}
    inputs: dict[Any, Tensor] = {}

    def keep(module: nn.Module, arguments: Any, result: Any) -> None:
        results[module] = result
        inputs[module] = arguments[0]

    parts_of_all = [part for layer in parts.values() for part in layer.values()]
    for module in {x for part in parts_of_all for x in (part.projection, part.norm and part.norm.module) if x}:
        module.register_forward_hook(keep)
    model(**make_batch("plain", labels=False))
    for part in parts_of_all:
        if has_norms or model_type in NONE or FAMILIES[model_type].style.project_across is not None:
            assert part.norm is None
        elif part.norm is not None and model_type not in SCALED:
            assert torch.equal(inputs[part.projection].flatten(), results[part.norm.module].flatten())
        elif part.norm is None:
            assert model_type == "modernbert-decoder"
            assert part in parts["model.layers.0.attn"].values()


@torch.no_grad()
def test_sizes_are_those_of_random_inputs(model_type):
    model = sharp_model(model_type)
    parts = parts_of(model)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if "norm" in name or "ln_1" in name:
            p.add_(torch.randn(p.shape, generator=generator) * 0.5)
    for layer in parts.values():
        found = sizes(layer)
        for name, part in layer.items():
            width = part.weight.shape[0 if isinstance(part.projection, Conv1D) else 1]
            x = torch.randn(4000, width, generator=generator)
            x = x / x.square().mean(1, keepdim=True).sqrt() if part.norm is None else part.norm.module(x)
            rows = part.projection(x)[:, part.outputs(x.device)]
            torch.testing.assert_close(found.inputs[name], rms(x), rtol=0.03, atol=0)
            torch.testing.assert_close(found.outputs[name], rms(rows, 0) * part.width**0.5, rtol=0.06, atol=0)


def rms(x: Tensor, head: int | None = None) -> Tensor:
    """The root mean square, over all entries, or of each head of `[N, heads, width]`."""
    return x.square().mean().sqrt() if head is None else x.square().mean((0, 2)).sqrt()


def test_a_norm_that_follows_or_is_removed_is_none():
    after = tiny_model("opt", do_layer_norm_before=False)
    folded = patch_model(tiny_model("llama"), "qkv_norm")
    own = tiny_model("olmo2")
    for model in (after, folded, own):
        assert all(part.norm is None for layer in attention_head_weights(model).values() for part in layer.values())
    assert len(attention_layers(own)) == 2
