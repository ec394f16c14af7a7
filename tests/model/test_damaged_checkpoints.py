"""A checkpoint loads correctly or raises an error: disagreeing weights and config are never repaired silently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
)

from hf_qknorm import FAMILIES, Scheme, patch_model
from hf_qknorm.model.derived import derived_model
from qknorm_tests.covering import covering
from qknorm_tests.folders import edit, edit_config
from qknorm_tests.tables import MODEL_TYPES, applies, randomise, sharp_model

NORMED = [t for t in MODEL_TYPES if not FAMILIES[t].own_norms]
SCHEME = Scheme(q="rms", k="rms", gain="per_head", softcap=30.0)
AUTO_CLASSES = (AutoModelForCausalLM, AutoModel, AutoModelForSequenceClassification)
each_way = pytest.mark.parametrize(
    ("checkpoint", "auto", "ignore"),
    covering(NORMED, AUTO_CLASSES, [False, True], strength=1),
    indirect=["checkpoint"],
    ids=str,
)
each_type = pytest.mark.parametrize(
    ("checkpoint", "ignore"), covering(MODEL_TYPES, [False, True], strength=1), indirect=["checkpoint"]
)


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model_type = getattr(request, "param", "llama")
    scheme = SCHEME if applies(model_type, SCHEME) else Scheme(softcap=30.0)
    randomise(patch_model(sharp_model(model_type), scheme)).save_pretrained(tmp_path)
    return tmp_path


def edit_gain(folder: Path, change: Callable[[dict[str, torch.Tensor], str], object]) -> str:
    """Apply `change` to the weights and the name of the last query gain, which is returned."""
    name = max(name for name in load_file(folder / "model.safetensors") if name.endswith("q_norm.weight"))
    edit(folder, lambda weights: change(weights, name))
    return name


def refusal(folder: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        auto.from_pretrained(folder, **options)
    return str(error.value)


@each_way
def test_a_missing_gain(checkpoint, auto, ignore):
    name = edit_gain(checkpoint, lambda weights, name: weights.pop(name))
    message = refusal(checkpoint, auto, ignore_mismatched_sizes=ignore)
    assert "1 norm tensors are missing" in message
    assert name.split(".", 1)[1] in message
    assert str(SCHEME) in message


@pytest.mark.parametrize("ignore", [False, True])
def test_a_gain_of_another_shape(checkpoint, ignore):
    name = edit_gain(checkpoint, lambda weights, name: weights.update({name: torch.ones(7)}))
    message = refusal(checkpoint, ignore_mismatched_sizes=ignore)
    assert f"of another shape in the weights ('{name}' is [7], expected [4, 16])" in message
    assert str(SCHEME) in message


@pytest.mark.parametrize(
    ("dtype", "auto"),
    covering([torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64], AUTO_CLASSES, strength=1),
    ids=str,
)
def test_an_integer_gain(checkpoint, auto, dtype):
    name = edit_gain(checkpoint, lambda weights, name: weights.update({name: weights[name].to(dtype)}))
    message = refusal(checkpoint, auto)
    assert "model.safetensors" in message
    assert f"{name!r} has dtype" in message


def test_an_integer_gain_in_memory_or_pickled(checkpoint):
    name = edit_gain(checkpoint, lambda weights, name: weights.update({name: weights[name].to(torch.int8)}))
    weights = load_file(checkpoint / "model.safetensors")
    config = AutoConfig.from_pretrained(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    torch.save(weights, checkpoint / "pytorch_model.bin")
    assert f"pytorch_model.bin: {name!r} has dtype torch.int8" in refusal(checkpoint)
    with pytest.raises(ValueError, match="state_dict: .* has dtype torch.int8"):
        derived_model(LlamaForCausalLM).from_pretrained(None, config=config, state_dict=weights)


@each_way
def test_gains_that_the_scheme_lacks(checkpoint, auto, ignore):
    edit_config(checkpoint, lambda config: config["qk_norm"].update(q=None, k=None))
    message = refusal(checkpoint, auto, ignore_mismatched_sizes=ignore)
    assert "8 norm tensors are in the weights but not in the scheme" in message
    assert "k_norm.knee" in message


@pytest.mark.parametrize("checkpoint", ["gpt2", "llama"], indirect=True)
def test_gains_of_a_base_model_that_the_full_model_lacks(checkpoint, tmp_path):
    """A base model's weights have names without the prefix that a model with a head adds."""
    AutoModel.from_pretrained(checkpoint).save_pretrained(tmp_path / "body")
    edit_config(tmp_path / "body", lambda config: config["qk_norm"].update(q=None, k=None))
    assert "in the weights but not in the scheme" in refusal(tmp_path / "body")
    assert "in the weights but not in the scheme" in refusal(tmp_path / "body", AutoModel)
    edit_config(tmp_path / "body", lambda config: config["qk_norm"].update(q="rms", k="rms", bias=True))
    assert "4 norm tensors are missing" in refusal(tmp_path / "body")


def test_a_scheme_that_needs_more_or_other_parameters(checkpoint):
    edit_config(checkpoint, lambda config: config["qk_norm"].update(bias=True))
    assert "missing" in refusal(checkpoint)
    edit_config(checkpoint, lambda config: config["qk_norm"].update(bias=None, gain="shared"))
    assert "of another shape" in refusal(checkpoint, ignore_mismatched_sizes=True)


@each_type
def test_a_scheme_from_a_later_version(checkpoint, ignore):
    edit_config(checkpoint, lambda config: config["qk_norm"].update(soft_caps=1))
    message = refusal(checkpoint, ignore_mismatched_sizes=ignore)
    assert "unknown scheme field 'soft_caps', did you mean 'softcap'" in message
    assert "newer hf_qknorm" in message
