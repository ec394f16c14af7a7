"""PEFT's own functions on patched models: default targets, the base model's name, classes to import, and gains."""

import json
import logging
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_qknorm import Scheme, patch_model
from qknorm_tests.adapters import adapted, needs_add_adapter
from qknorm_tests.tables import make_batch, randomise, sharp_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning"),  # peft uses the old name
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),
]


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_patched_model_has_the_default_targets_of_its_base(model_type):
    model = sharp_model(model_type)
    expected = peft.get_peft_model(model, peft.LoraConfig(r=2)).targeted_module_names
    patched = patch_model(sharp_model(model_type), "soft_cap")
    assert peft.get_peft_model(patched, peft.LoraConfig(r=2)).targeted_module_names == expected


GAINS = {"modules_to_save": ["q_norm", "k_norm"]}
TUNING = peft.LNTuningConfig(target_modules=["input_layernorm", "q_norm", "k_norm"])  # whose file has other names
LAYER, RMS = (Scheme(q=norm, k=norm) for norm in ("layer", "rms"))
# Model type, an adapter of a patched model, the scheme that it is refused with or none, and what the adapter holds.
REFUSED: list[tuple[str, Callable[[Any], Any], Scheme | None, str]] = [
    ("llama", lambda model: adapted(model, **GAINS), None, r"\w+, of a norm that this Llama"),
    ("gpt2", lambda model: adapted(model, **GAINS), None, r"\w+, of a norm that this GPT2"),
    ("llama", lambda model: peft.get_peft_model(model, TUNING), None, r"ln_tuning_layers\.\w+, of a norm"),
    ("llama", lambda model: adapted(model, **GAINS), RMS, "bias, of a norm that this QKNormLlama"),
]


@pytest.mark.parametrize(("model_type", "adapt", "scheme", "held"), REFUSED)
def test_an_adapter_with_gains_is_refused_by_an_unpatched_model(model_type, adapt, scheme, held, tmp_path):
    """And one with biases by norms without."""
    adapt(patch_model(sharp_model(model_type), LAYER)).save_pretrained(tmp_path)
    model = sharp_model(model_type)
    with pytest.raises(ValueError, match=rf"holds \S+\.[qk]_norm\.{held}"):
        peft.PeftModel.from_pretrained(model if scheme is None else patch_model(model, scheme), tmp_path)
    peft.PeftModel.from_pretrained(patch_model(sharp_model(model_type), LAYER), tmp_path)


def test_an_adapter_of_the_whole_of_a_patched_part_is_not_saved(tmp_path):
    """Its base, the whole as it was loaded, has no scheme."""
    model = sharp_model("llama")
    patch_model(model.model, "soft_cap")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="the model's config does not hold its scheme"):
        wrapped.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("saved", [["q_norm", "k_norm"], ["self_attn"]])  # the norms, and a module that holds them
def test_an_adapter_of_a_model_with_its_own_norms_loads(saved, tmp_path):
    settings = peft.LoraConfig(target_modules=["up_proj"], modules_to_save=saved)
    model = peft.get_peft_model(sharp_model("qwen3"), settings)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and "_norm." in name}
    with torch.no_grad():
        for number, gain in enumerate(trained.values(), start=2):
            gain.fill_(number)
    model.save_pretrained(tmp_path)
    loaded = dict(peft.PeftModel.from_pretrained(sharp_model("qwen3"), tmp_path).named_parameters())
    assert len(trained) == 4
    assert all(torch.equal(loaded[name], gain) for name, gain in trained.items())


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
    end = "not saved: put the folder of the saved model here"
    assert stored["soft_cap"] == f"{name} (changed in memory, softcap=50.0 in qknorm_llama, {end})"
    with pytest.raises(OSError, match=end):
        AutoModelForCausalLM.from_pretrained(tmp_path / "soft_cap")


def test_an_adapter_without_a_task_loads_on_a_patched_checkpoint(tmp_path):
    """PEFT then stores the class of the base model, and imports its module."""
    randomise(patch_model(sharp_model("llama"), "qk_norm_cap")).save_pretrained(tmp_path / "base")
    model = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    model.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(again(**make_batch("left")).logits, model(**make_batch("left")).logits)
