"""A checkpoint loads correctly or raises an error: disagreeing weights and config are never repaired silently."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.llama import LlamaForCausalLM

from hf_qknorm import FAMILIES, Scheme, patch_model
from hf_qknorm.model.derived import derived_model
from qknorm_tests.covering import covering
from qknorm_tests.folders import edit, edit_config
from qknorm_tests.tables import MODEL_TYPES, randomise, sharp_model

NORMED = [t for t in MODEL_TYPES if not FAMILIES[t].own_norms]
SCHEME = Scheme(q="rms", k="rms", gain="per_head", softcap=30.0)
AUTO_CLASSES = (AutoModelForCausalLM, AutoModel, AutoModelForSequenceClassification)
DTYPES = (torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64)


def weights(change: Callable[[Any, str], object]) -> Callable[[Path, str], object]:
    """A change of the tensors in the file, given the name of one."""
    return lambda folder, name: edit(folder, lambda tensors: change(tensors, name))


def scheme(**fields: Any) -> Callable[[Path, str], object]:
    """A change of the scheme in config.json."""
    return lambda folder, name: edit_config(folder, lambda config: config["qk_norm"].update(fields))


def cast(dtype: torch.dtype) -> Callable[[Path, str], object]:
    return weights(lambda tensors, name: tensors.update({name: tensors[name].to(dtype)}))


# The norm's tensor that is damaged, the damage, and words of the refusal.
DAMAGE: dict[str, tuple[str, Callable[[Path, str], object], tuple[str, ...]]] = {
    "a gain is missing": (
        "weight",
        weights(lambda tensors, name: tensors.pop(name)),
        ("1 norm tensors are missing", "1.{attention}.q_norm.weight", str(SCHEME)),
    ),
    "a gain has another shape": (
        "weight",
        weights(lambda tensors, name: tensors.update({name: torch.ones(7)})),
        ("of another shape in the weights", "q_norm.weight' is [7], expected [4, 16])", str(SCHEME)),
    ),
    **{
        f"a gain is {dtype}": ("weight", cast(dtype), ("model.safetensors: '", "q_norm.weight' has dtype"))
        for dtype in DTYPES
    },
    "a knee is impossible": (
        "knee",
        weights(lambda tensors, name: tensors[name].fill_(float("nan"))),
        ("q_norm.knee' is [nan, nan, nan], expected three finite numbers",),
    ),
    "a knee is missing": (
        "knee",
        weights(lambda tensors, name: tensors.pop(name)),
        ("1 norm tensors are missing from the weights, first", "q_norm.knee'. The config"),
    ),
    "the scheme lacks the gains": (
        "weight",
        scheme(q=None, k=None),
        ("8 norm tensors are in the weights but not in the scheme", "k_norm.knee"),
    ),
    "the scheme has more parameters": ("weight", scheme(bias=True), ("4 norm tensors are missing",)),
    "the scheme has other parameters": ("weight", scheme(gain="shared"), ("of another shape",)),
    "the scheme is of a later version": (
        "weight",
        scheme(soft_caps=1),
        ("unknown scheme field 'soft_caps', did you mean 'softcap'", "newer hf_qknorm"),
    ),
}


def saved(model_type: str, folder: Path) -> str:
    """Save a patched model; returns the path of its last query norm."""
    randomise(patch_model(sharp_model(model_type), SCHEME)).save_pretrained(folder)
    names = load_file(folder / "model.safetensors")
    return max(name for name in names if name.endswith("q_norm.weight")).removesuffix(".weight")


def refusal(folder: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        auto.from_pretrained(folder, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("damage", "model_type", "auto", "ignore"),
    covering(DAMAGE, NORMED, AUTO_CLASSES, [False, True], strength=1),
    ids=str,
)
def test_a_damaged_checkpoint_is_refused(damage, model_type, auto, ignore, tmp_path):
    kind, change, words = DAMAGE[damage]
    norm = saved(model_type, tmp_path)
    change(tmp_path, f"{norm}.{kind}")
    message = refusal(tmp_path, auto, ignore_mismatched_sizes=ignore)
    assert all(word.format(attention=norm.split(".")[-2]) in message for word in words), message


def test_an_integer_gain_in_memory_or_pickled(tmp_path):
    name = f"{saved('llama', tmp_path)}.weight"
    cast(torch.int8)(tmp_path, name)
    tensors, config = load_file(tmp_path / "model.safetensors"), AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert f"pytorch_model.bin: {name!r} has dtype torch.int8" in refusal(tmp_path)
    with pytest.raises(ValueError, match="state_dict: .* has dtype torch.int8"):
        derived_model(LlamaForCausalLM).from_pretrained(None, config=config, state_dict=tensors)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_gains_of_a_base_model_that_the_full_model_lacks(model_type, tmp_path):
    """A base model's weights have names without the prefix that a model with a head adds."""
    saved(model_type, tmp_path)
    AutoModel.from_pretrained(tmp_path).save_pretrained(tmp_path / "body")
    scheme(q=None, k=None)(tmp_path / "body", "")
    for auto in AUTO_CLASSES[:2]:
        assert "in the weights but not in the scheme" in refusal(tmp_path / "body", auto)
    scheme(q="rms", k="rms", bias=True)(tmp_path / "body", "")
    assert "4 norm tensors are missing" in refusal(tmp_path / "body")
