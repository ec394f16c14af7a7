"""torch.compile traces a patched model into one graph, without a break, and computes the same."""

from __future__ import annotations

import shutil

import pytest
import torch
from tables import MODEL_TYPES, applies, assert_near, make_batch, randomise, sharp_model
from torch import Tensor
from transformers import PreTrainedModel

from hf_qknorm import SCHEMES, patch_model

MODELS = [(t, "qk_norm_cap" if applies(t, SCHEMES["qk_norm_cap"]) else "soft_cap") for t in MODEL_TYPES]
MODELS += [("llama", "none"), ("llama", "lp"), ("llama", "qkv_norm"), ("gpt2", "qkv_norm")]
TOLERANCE = 1e-5


pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def outcome(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits and every gradient of their mean square. The loss of the model itself warns, in GPT-2, and so breaks."""
    model.zero_grad()
    logits = model(**batch, use_cache=False).logits
    logits.square().mean().backward()
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        if value.abs().max() > 1e-6:  # a bias that softmax cannot see has a gradient of rounding errors alone
            assert_near(actual[name], value, TOLERANCE, name)


@pytest.mark.parametrize(("model_type", "preset"), MODELS)
def test_one_graph(model_type, preset):
    model = randomise(patch_model(sharp_model(model_type), preset))
    if model_type == "mixtral":  # the default's backward has no trace on the CPU in older transformers
        model.set_experts_implementation("batched_mm")
    batch = make_batch("left", labels=False)
    expected = outcome(model, batch)
    model.compile(backend="aot_eager", fullgraph=True)
    assert_same(outcome(model, batch), expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor on the CPU needs a C++ compiler")
def test_inductor_with_backward():
    model = randomise(patch_model(sharp_model("llama"), "qk_norm_cap"))
    batch = make_batch("plain", labels=False)
    expected = outcome(model, batch)
    model.compile(fullgraph=True)
    assert_same(outcome(model, batch), expected)
