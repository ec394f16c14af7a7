"""Adapters on a patched model: norms get the projections' output with the adapter, and merging is exact."""

from __future__ import annotations

import json
import logging
from typing import Any

import peft
import pytest
import torch
from adapters import needs_add_adapter
from covering import covering
from tables import MODEL_TYPES, applies, assert_near, make_batch, randomise, sharp_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_qknorm import FAMILIES, SCHEMES, patch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.derived import QKNormModel

PRESETS = ("qk_norm_cap", "qkv_norm", "soft_cap")
MODELS = covering(MODEL_TYPES, PRESETS, fits=lambda t, name: applies(t, SCHEMES[name]), strength=1)
TOLERANCE = 1e-5

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing:FutureWarning",  # peft uses the old name
    "ignore:fan_in_fan_out:UserWarning",
)


def adapted(model: PreTrainedModel, *, seed: int = 0, **options: Any) -> peft.PeftModel:
    """LoRA on all projections to q, k and v, with random weights in both matrices."""
    family = FAMILIES[model.config.base_model_type]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(family.style.weights), **options))
    set_adapters(wrapped, seed)
    return wrapped.eval()


@torch.no_grad()
def set_adapters(model: peft.PeftModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


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


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_an_adapter_with_gains_is_refused_by_an_unpatched_model(model_type, tmp_path):
    model = adapted(patch_model(sharp_model(model_type), "qk_norm"), modules_to_save=["q_norm", "k_norm"])
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds \S+\.[qk]_norm\.\w+, the gain of a norm that this"):
        peft.PeftModel.from_pretrained(sharp_model(model_type), tmp_path)
    peft.PeftModel.from_pretrained(patch_model(sharp_model(model_type), "qk_norm"), tmp_path)


def test_an_adapter_of_a_model_with_its_own_norms_loads(tmp_path):
    settings = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["q_norm", "k_norm"])
    model = peft.get_peft_model(sharp_model("qwen3"), settings)
    trained = {name: p for name, p in model.named_parameters() if "_norm.modules_to_save" in name}
    with torch.no_grad():
        for number, gain in enumerate(trained.values(), start=2):
            gain.fill_(number)
    model.save_pretrained(tmp_path)
    loaded = dict(peft.PeftModel.from_pretrained(sharp_model("qwen3"), tmp_path).named_parameters())
    assert len(trained) == 4
    assert all(torch.equal(loaded[name], gain) for name, gain in trained.items())


@needs_add_adapter
def test_adapters_added_by_transformers_add_adapter():
    model = randomise(patch_model(sharp_model("llama"), "qk_norm_cap"))
    before = model(**make_batch("left")).logits
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    assert torch.equal(model(**make_batch("left")).logits, before), "a fresh adapter adds nothing"
    set_adapters(model, seed=0)
    assert not torch.allclose(model(**make_batch("left")).logits, before, atol=1e-2)


@pytest.mark.parametrize("way", ["get_peft_model", pytest.param("add_adapter", marks=needs_add_adapter)])
def test_an_adapter_does_not_lead_to_the_unpatched_model(way, tmp_path, caplog, monkeypatch):
    """The name of its base model says which folder belongs there; the scheme "none" changes no base model.

    PEFT compares the size of the vocabulary with the unpatched config, by the derived class: transformers has nothing
    to say about it.
    """
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # to caplog
    sharp_model("llama").save_pretrained(tmp_path / "unpatched")
    stored = {}
    for scheme in ("soft_cap", "none"):
        model = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "unpatched"), scheme)
        adapter = peft.LoraConfig(r=2, target_modules=["q_proj"])
        if way == "add_adapter":
            model.add_adapter(adapter)
        else:
            model = peft.get_peft_model(model, adapter)
        model.save_pretrained(tmp_path / scheme)
        stored[scheme] = json.loads((tmp_path / scheme / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert "to instantiate a model of type" not in caplog.text
    name = str(tmp_path / "unpatched")
    assert stored["none"] == name
    assert stored["soft_cap"] == f"{name} (changed in memory, not saved: put the folder of the saved model here)"
    with pytest.raises(OSError, match="put the folder of the saved model here"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "soft_cap")


def test_an_adapter_without_a_task_loads_on_a_patched_checkpoint(tmp_path):
    """PEFT then stores the class of the base model, and imports its module."""
    randomise(patch_model(sharp_model("llama"), "qk_norm_cap")).save_pretrained(tmp_path / "base")
    model = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    model.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(again(**make_batch("left")).logits, model(**make_batch("left")).logits)
