"""Adapters on a patched model: norms get the projections' output with the adapter, and merging is exact."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_qknorm import FAMILIES, SCHEMES, patch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.derived import QKNormModel
from qknorm_tests.adapters import adapted, needs_add_adapter, set_adapters
from qknorm_tests.covering import covering
from qknorm_tests.tables import MODEL_TYPES, applies, assert_near, make_batch, randomise, sharp_model

PRESETS = ("qk_norm_cap", "qkv_norm", "soft_cap")
MODELS = covering(MODEL_TYPES, PRESETS, fits=lambda t, name: applies(t, SCHEMES[name]), strength=1)
TOLERANCE = 1e-5

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing:FutureWarning",  # peft uses the old name
    "ignore:fan_in_fan_out:UserWarning",
)


def normed_queries(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The output of the first layer's query norm."""
    seen: list[Tensor] = []
    layer = next(iter(patched_layers(model).values()))
    handle = layer.q_norm.register_forward_hook(lambda module, args, output: seen.append(output))
    model(**batch)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("model_type", [t for t in MODEL_TYPES if not FAMILIES[t].own_norms])
@torch.no_grad()
def test_the_norm_sees_the_adapters_output(model_type):
    model = adapted(randomise(patch_model(sharp_model(model_type), "qk_norm")))
    batch = make_batch("plain", labels=False)
    first = normed_queries(model, batch)
    set_adapters(model, seed=1)
    second = normed_queries(model, batch)
    assert not torch.allclose(first, second, atol=1e-2)
    gain = next(iter(patched_layers(model).values())).q_norm.weight
    if FAMILIES[model_type].norm == "rms":  # the norm's output has rms 1, whatever the adapter adds
        torch.testing.assert_close((second / gain).square().mean(-1), torch.ones(second.shape[:-1]), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("model_type", "preset"), MODELS)
@torch.no_grad()
def test_merging_is_exact(model_type, preset):
    model = adapted(randomise(patch_model(sharp_model(model_type), preset)))
    batch = make_batch("left")
    expected = model(**batch).logits
    with model.disable_adapter():
        assert not torch.allclose(model(**batch).logits, expected, atol=1e-2), "the adapters matter"
    merged = model.merge_and_unload()
    assert isinstance(merged, QKNormModel)
    assert_near(merged(**batch).logits, expected, TOLERANCE)


def test_adapters_and_gains_in_modules_to_save_train():
    model = adapted(patch_model(sharp_model("llama"), "qk_norm"), modules_to_save=["q_norm", "k_norm"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert sum("_norm.modules_to_save.default.weight" in name for name in trained) == 4
    model(**make_batch("left")).loss.backward()
    assert all(
        p.grad.abs().max() > 0 for name, p in model.named_parameters() if name in trained and "v_proj" not in name
    )


@torch.no_grad()
def test_adapters_are_saved_and_loaded_beside_a_patched_checkpoint(tmp_path):
    base = randomise(patch_model(sharp_model("llama"), "qk_norm_cap"))
    base.save_pretrained(tmp_path / "base")
    model = adapted(base)
    expected = model(**make_batch("left")).logits
    model.save_pretrained(tmp_path / "adapter")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    reloaded = peft.PeftModel.from_pretrained(reloaded, tmp_path / "adapter").eval()
    assert torch.equal(reloaded(**make_batch("left")).logits, expected)
    assert len(patched_layers(reloaded)) == 2


@needs_add_adapter
def test_adapters_added_by_transformers_add_adapter():
    model = randomise(patch_model(sharp_model("llama"), "qk_norm_cap"))
    before = model(**make_batch("left")).logits
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    assert torch.equal(model(**make_batch("left")).logits, before), "a fresh adapter adds nothing"
    set_adapters(model, seed=0)
    assert not torch.allclose(model(**make_batch("left")).logits, before, atol=1e-2)
