"""Patched checkpoints loaded by bitsandbytes and Quanto: the projections shrink, the gains stay what they were."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, QuantoConfig

from hf_qknorm import Scheme, patch_model
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.standalone.generate import add_standalone
from qknorm_tests.folders import save
from qknorm_tests.tables import assert_near, make_batch, randomise, sharp_model

SCHEME = Scheme(q="rms", k="layer", v="rms", gain="per_head", bias=True, softcap=5.0)
WIDE = {"intermediate_size": 128}  # of whole blocks, as 4-bit weights need
# The library of each, and its settings
CONFIGS: dict[str, tuple[str, Any]] = {
    "4 bit": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)),
    "8 bit": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True)),
    "Quanto": ("optimum.quanto", lambda: QuantoConfig(weights="int8")),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[PreTrainedModel, Path]:
    model = randomise(patch_model(sharp_model("llama", **WIDE), SCHEME), knee=4.0).eval()
    return model, save(model, tmp_path_factory.mktemp("saved"))


def quantised(name: str, folder: Path) -> PreTrainedModel:
    library, config = CONFIGS[name]
    pytest.importorskip(library, reason=f"needs {library}")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config(), device_map="cpu").eval()


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_the_gains_are_not_quantised(name, saved):
    model, folder = saved
    small = quantised(name, folder)
    assert type(small.model.layers[0].self_attn.q_proj) is not torch.nn.Linear
    for layer, own in zip(patched_layers(small).values(), patched_layers(model).values(), strict=True):
        for norm, expected in head_norms(own).items():
            for kind, value in expected.named_parameters():
                gain = layer.get_parameter(f"{norm}.{kind}")
                assert torch.equal(gain.float(), value.to(gain.dtype).float())
                assert gain.is_floating_point()
            assert torch.equal(layer.get_submodule(norm).knee.float(), expected.knee.float())
    if name != "4 bit":  # four bits of random weights leave too little to compare
        assert_near(small(**make_batch("left")).logits, model(**make_batch("left")).logits, 0.1)


@pytest.mark.parametrize("name", ["4 bit", "8 bit"])
@torch.no_grad()
def test_saved_quantised_it_comes_back_with_its_code(name, saved, tmp_path):
    small = quantised(name, saved[1])
    add_standalone(small)
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    assert torch.equal(again(**make_batch("left")).logits, small(**make_batch("left")).logits)
    assert (tmp_path / "modeling_qknorm.py").is_file()


def test_gains_of_a_quantised_model_are_trained(saved):
    """As QLoRA does beside its adapters."""
    small = quantised("4 bit", saved[1])
    gains = [p for layer in patched_layers(small).values() for n in head_norms(layer).values() for p in n.parameters()]
    for gain in gains:
        gain.requires_grad_()
    small(**make_batch("plain")).loss.backward()
    assert all(gain.grad is not None and gain.grad.abs().max() > 0 for gain in gains)
