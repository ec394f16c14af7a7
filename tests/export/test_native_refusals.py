"""Inexact exports, and weights that do not match the config, are refused; nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_native import CASES, EPS, LAYER, RMS, save_patched
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from hf_qknorm import Scheme, export_native, patch_model
from hf_qknorm.export.targets import TARGETS
from qknorm_tests.folders import configure, edit
from qknorm_tests.tables import sharp_model

SECOND = "model.layers.1"
GAIN = f"{SECOND}.self_attn.q_norm.weight"

# How the norms of a saved checkpoint are damaged, and the message of the refusal; test_refusals.py has other damage.
DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no gains": (
        lambda t: [t.pop(name) for name in list(t) if "_norm." in name and "self_attn" in name],
        "ours: 8 norm tensors are missing from the weights, first 'model.layers.0.self_attn.k_norm.knee'",
    ),
    "no gain": (lambda t: t.pop(GAIN), f"ours: 1 norm tensors are missing from the weights, first '{GAIN}'"),
    "one number": (
        lambda t: t.update({GAIN: torch.ones(1)}),
        rf"ours: 1 norm tensors are of another shape in the weights \('{GAIN}' is \[1\], expected \[16\]\)",
    ),
    "another norm": (
        lambda t: t.update({f"{SECOND}.self_attn.v_norm.weight": torch.ones(16)}),
        f"ours: 1 norm tensors are in the weights but not in the scheme, first '{SECOND}.self_attn.v_norm.weight'",
    ),
    "not finite": (lambda t: t.update({GAIN: torch.full((16,), float("nan"))}), f"ours: {GAIN} holds NaN or infinity"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_weights_that_do_not_fit_the_scheme_are_refused(tmp_path, damage):
    change, message = DAMAGE[damage]
    save_patched(tmp_path / "ours", "llama", EPS, RMS)
    edit(tmp_path / "ours", change)
    with pytest.raises(ValueError, match=message) as error:
        export_native(tmp_path / "ours", tmp_path / "theirs")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_tensor_that_the_target_does_not_read_is_not_lost(tmp_path, monkeypatch):
    """A patched model reads these biases, Qwen 3 without `attention_bias` does not."""
    save_patched(tmp_path / "ours", "llama", EPS | {"attention_bias": True}, RMS)
    monkeypatch.setattr("hf_qknorm.export.transforms.biased", lambda config: False)
    with pytest.raises(ValueError, match=r"is not exported: .*k_proj.bias.* would be lost: a Qwen3ForCausalLM"):
        export_native(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("sharpness", [0.0, -1.0, float("nan")])
def test_an_impossible_knee_is_refused_by_name(sharpness, tmp_path):
    save_patched(tmp_path / "ours", "llama", EPS, RMS, knee=4.0)
    name = f"{SECOND}.self_attn.k_norm.knee"
    edit(tmp_path / "ours", lambda t: t[name][2:].fill_(sharpness))
    with pytest.raises(ValueError, match=f"{name}.* is .* expected three finite numbers, the last at least 1"):
        export_native(tmp_path / "ours", tmp_path / "theirs")


def test_a_checkpoint_without_a_knee_is_refused(tmp_path):
    save_patched(tmp_path / "ours", "llama", EPS, RMS)
    name = f"{SECOND}.self_attn.k_norm.knee"
    edit(tmp_path / "ours", lambda t: t.pop(name))
    with pytest.raises(ValueError, match=f"{name}"):
        export_native(tmp_path / "ours", tmp_path / "theirs")


def test_a_factor_that_no_dtype_can_hold_is_refused(tmp_path):
    patch_model(sharp_model("llama", rms_norm_eps=1e-300), "qk_norm").save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="q_proj.weight would be multiplied by 1e-147: the norm's eps=1e-06 is not"):
        export_native(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Model type, settings, scheme, and the message of the refusal.
REFUSED: dict[str, tuple[str, dict[str, Any], Scheme | str, str]] = {
    "cap-and-norms": ("llama", EPS, "qk_norm_cap", r"k=rms\) or the cap of 50 would be lost: .* a llama with norms"),
    "gemma2-own-cap": ("gemma2", {}, "qk_norm", r"k=rms\) or the cap of 50 would be lost: .* a gemma2 with norms"),
    "values": ("llama", EPS, "qkv_norm", "the norm of the values would be lost: convert with"),
    "queries-alone": ("llama", EPS, "q_norm", "not one of them: convert with a scheme on both"),
    "keys-alone": ("llama", EPS, Scheme(k="rms"), "not one of them: convert with a scheme on both"),
    "order": ("llama", EPS, "lp", "of order 2, not p=3: convert with henry or qk_norm"),
    "per-head": ("llama", EPS, Scheme(q="rms", k="rms", gain="per_head"), 'convert with gain="shared"'),
    "two-kinds": ("llama", EPS, Scheme(q="rms", k="layer", bias=False), r"norms \(q=rms, k=layer\) would be lost"),
    "rms-bias": ("llama", EPS, Scheme(q="rms", k="rms", bias=True), "biases of the norms.*convert with bias=False"),
    "layer-norm": ("llama", EPS, LAYER, r"norms \(q=layer, k=layer\) would be lost.*gpt_neox with layer"),
    "mlp-bias": ("llama", EPS | {"mlp_bias": True}, RMS, "qwen3 would be.*biases of the MLP would be lost"),
    "mlp-bias-cap": ("llama", {"mlp_bias": True}, "soft_cap", "vaultgemma would be.*biases of the MLP would be lost"),
    "mixtral-cap": ("mixtral", {}, "soft_cap", "the cap of 50 would be lost.*llama with a cap"),
    "qwen3-cap": ("qwen3", {}, "soft_cap", "the cap of 50 would be lost"),
    "gpt2": ("gpt2", {}, "qk_norm", r"norms \(q=rms, k=rms\) would be lost"),
    "gpt2-scale": ("gpt2", {}, Scheme(scale=1.0), "scale=1 would be lost: gpt2 has no projection of the queries alone"),
    "serial-neox": ("gpt_neox", {"use_parallel_residual": False}, LAYER, "attention and MLP are in parallel there"),
    "partial-phi3": (
        "phi3", EPS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        RMS, "partial_rotary_factor=0.5 would be lost: only Phi-3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_inexact_exports_are_refused(tmp_path, case):
    model_type, settings, scheme, message = REFUSED[case]
    save_patched(tmp_path / "ours", model_type, settings, scheme)
    with pytest.raises(ValueError, match=rf"ours \({model_type}, .*is not exported: .*{message}"):
        export_native(tmp_path / "ours", tmp_path / "theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "llama-another-eps",
            r"eps=1e-06 is not the model's 0.001.*scaled by 31.62.*\(..., eps=0.001\)",
        ),
        ("llama-another-scale", "the queries' gains would be scaled"),
        ("llama-henry-wide-heads", "the queries' gains would be scaled"),
        ("llama-cap", "stored as their difference from 1"),
        ("gemma2-scale", "scale=0.3 would be folded"),
        ("gpt_neox", "two norms of a layer would become one"),
    ],
)
def test_rounding_of_sixteen_bits_is_refused(tmp_path, case, message):
    patched = save_patched(tmp_path / "first", *CASES[case][:3])
    patched.to(torch.bfloat16).save_pretrained(tmp_path / "ours")
    with pytest.raises(
        ValueError, match=rf"not be exact in bfloat16: .*{message}.*Save the checkpoint in float32 first"
    ):
        export_native(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_only_complete_patched_causal_models_are_exported(tmp_path):
    sharp_model("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="is a plain llama, not a patched model"):
        export_native(tmp_path / "plain", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        export_native(tmp_path / "empty", tmp_path / "out")
    model = save_patched(tmp_path / "ours", *CASES["llama"][:3])
    with pytest.raises(FileExistsError, match="is the source, or contains it"):
        export_native(tmp_path / "ours", tmp_path / "ours", overwrite=True)
    configure(tmp_path / "ours", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="is quantised"):
        export_native(tmp_path / "ours", tmp_path / "out")
    classifier = AutoModelForSequenceClassification.from_config(model.config)
    classifier.save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match="as a causal language model only, got LlamaForSequenceClassification"):
        export_native(tmp_path / "classifier", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_knee_of_another_shape(tmp_path):
    patch_model(sharp_model("llama"), RMS).save_pretrained(tmp_path / "ours")
    name = "model.layers.0.self_attn.k_norm.knee"
    edit(tmp_path / "ours", lambda tensors: tensors.update({name: tensors[name][None]}))
    with pytest.raises(ValueError, match=rf"{name}' has shape \[1, 3\], expected \[3\]"):
        export_native(tmp_path / "ours", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("model_type", TARGETS)
def test_a_sharpness_is_not_lost(model_type, tmp_path):
    save_patched(tmp_path / "ours", model_type, {}, LAYER if model_type == "gpt_neox" else RMS, knee=4.0, sharpness=8.0)
    with pytest.raises(ValueError, match="the sharpness of 8 would be lost: .*--knee 16"):
        export_native(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()
