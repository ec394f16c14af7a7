"""Exports of checkpoints whose weights do not fit the config are refused by file and tensor; nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from folders import configure, edit
from safetensors.torch import load_file
from tables import sharp_model
from test_native import EPS, LAYER, RMS, save_patched
from torch import Tensor

from hf_qknorm import export_native, patch_model

SECOND = "model.layers.1"
GAIN = f"{SECOND}.self_attn.q_norm.weight"

# How a checkpoint is harmed after it was saved, and what the refusal says.
HARMED: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no gains": (
        lambda t: [t.pop(name) for name in list(t) if "_norm." in name and "self_attn" in name],
        r"model.layers.0.self_attn.q_norm.weight is not there, expected \[16\], as .*config.json asks .*q=rms, k=rms",
    ),
    "no gain": (lambda t: t.pop(GAIN), rf"model.safetensors: {GAIN} is not there, expected \[16\]"),
    "one number": (
        lambda t: t.update({GAIN: torch.ones(1)}),
        rf"model.safetensors: {GAIN} has shape \[1\], expected \[16\]",
    ),
    "another norm": (
        lambda t: t.update({f"{SECOND}.self_attn.v_norm.weight": torch.ones(16)}),
        rf"model.safetensors: {SECOND}.self_attn.v_norm.weight is the weight of a norm that a QKNormLlama.* not have",
    ),
    "a bias": (
        lambda t: t.update({f"{SECOND}.self_attn.q_norm.bias": torch.ones(16)}),
        rf"{SECOND}.self_attn.q_norm.bias is the weight of a norm",
    ),
    "not finite": (
        lambda t: t.update({GAIN: torch.full((16,), float("nan"))}),
        rf"model.safetensors: {GAIN} holds NaN or infinity",
    ),
    "integers": (lambda t: t.update({GAIN: torch.ones(16, dtype=torch.int8)}), rf"{GAIN} is stored as I8"),
    "no MLP": (
        lambda t: [t.pop(name) for name in list(t) if ".mlp." in name],
        r"no entry for model.layers.0.mlp.gate_proj.weight \[96, 64\] and 5 more",
    ),
    "another shape": (
        lambda t: t.update({f"{SECOND}.mlp.up_proj.weight": torch.ones(8, 64)}),
        rf"model.safetensors: {SECOND}.mlp.up_proj.weight has shape \[8, 64\], expected \[96, 64\]",
    ),
}


@pytest.mark.parametrize("harm", HARMED)
def test_weights_that_do_not_fit_the_scheme_are_refused(tmp_path, harm):
    change, message = HARMED[harm]
    save_patched(tmp_path / "ours", "llama", EPS, RMS)
    edit(tmp_path / "ours", change)
    with pytest.raises(ValueError, match=message) as error:
        export_native(tmp_path / "ours", tmp_path / "theirs")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize("model_type", ["llama", "phi3", "mixtral", "gpt_neox"])
def test_a_config_with_more_layers_than_the_weights_is_refused(tmp_path, model_type):
    scheme = LAYER if model_type == "gpt_neox" else RMS
    save_patched(tmp_path / "ours", model_type, {} if model_type == "gpt_neox" else EPS, scheme)
    configure(tmp_path / "ours", num_hidden_layers=4)
    message = r"no entry for .*layers\.2\..* and \d+ more, which .*config.json asks for \(num_hidden_layers=4"
    with pytest.raises(ValueError, match=message):
        export_native(tmp_path / "ours", tmp_path / "theirs")


def test_a_tensor_that_the_target_does_not_read_is_not_lost(tmp_path, monkeypatch):
    """A patched model reads these biases, and Qwen 3 without `attention_bias` would leave them out."""
    save_patched(tmp_path / "ours", "llama", EPS | {"attention_bias": True}, RMS)
    monkeypatch.setattr("hf_qknorm.export.transforms.biased", lambda config: False)
    with pytest.raises(ValueError, match=r"is not exported: .*k_proj.bias.* would be lost: a Qwen3ForCausalLM"):
        export_native(tmp_path / "ours", tmp_path / "theirs")


def test_what_the_patched_model_does_not_read_goes_along(tmp_path):
    save_patched(tmp_path / "ours", "llama", EPS, RMS)
    edit(tmp_path / "ours", lambda t: t.update({"notes": torch.ones(2)}))
    export_native(tmp_path / "ours", tmp_path / "theirs")
    assert "notes" in load_file(tmp_path / "theirs" / "model.safetensors")


@pytest.mark.parametrize("eps", [0.0, -1.0, float("nan")])
def test_a_knee_that_can_not_be_right_is_refused_by_name(eps, tmp_path):
    save_patched(tmp_path / "ours", "llama", EPS, replace(RMS, knee=4.0))
    name = f"{SECOND}.self_attn.k_norm.eps"
    edit(tmp_path / "ours", lambda t: t.update({name: torch.tensor(eps)}))
    message = "holds NaN" if eps != eps else f"is {eps:g}, expected a finite number ≥ 1e-06, the scheme's eps"
    with pytest.raises(ValueError, match=f"model.safetensors: {name} {message}"):
        export_native(tmp_path / "ours", tmp_path / "theirs")


def test_a_factor_that_no_dtype_can_hold_is_refused(tmp_path):
    patch_model(sharp_model("llama", rms_norm_eps=1e-300), "qk_norm").save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="q_proj.weight would be multiplied by 1e-147: the scheme's eps=1e-06 is not"):
        export_native(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()
