"""Exports that would not be exact, and sources that are damaged, are refused with nothing written."""

import math
from typing import Any

import pytest
import torch
from test_export import CASES, EPS, RMS, save_patched
from transformers import AutoModelForSequenceClassification

from hf_qknorm import Scheme, export_native, patch_model, set_knee
from qknorm_tests.folders import configure, edit
from qknorm_tests.tables import randomise, sharp_model

# A patched model, its knee (None: as it is), and the message of the refusal.
REFUSED: dict[str, tuple[str, dict[str, Any], Scheme | str, float | None, str]] = {
    "cap and norms": ("llama", EPS, "qk_norm_cap", None, "the cap of 50 would be lost. In Python, remove_norms"),
    "own cap": ("gemma2", {}, "qk_norm", None, r"k=rms\) or the cap of 50 would be lost"),
    "cap alone": ("llama", {}, "soft_cap", None, "the cap of 50 would be lost"),
    "scale alone": ("llama", {}, Scheme(scale=0.3), None, "scale=0.3 would be lost"),
    "values": ("llama", EPS, "qkv_norm", None, "the norm of the values would be lost: convert with"),
    "queries alone": ("llama", EPS, "q_norm", None, r"norms \(q=rms, k=None\) would be lost: convert with a scheme on"),
    "order": ("llama", EPS, "lp", None, "norms of order p=3 would be lost: convert with henry or qk_norm"),
    "per head": ("llama", EPS, Scheme(q="rms", k="rms", gain="per_head"), None, 'convert with gain="shared"'),
    "two kinds": ("llama", EPS, Scheme(q="rms", k="layer", bias=False), None, r"norms \(q=rms, k=layer\) would be l"),
    "biases": ("llama", EPS, Scheme(q="rms", k="rms", bias=True), None, "biases of the norms.*convert with bias=False"),
    "mlp bias": ("llama", EPS | {"mlp_bias": True}, RMS, None, "biases of the MLP would be lost"),
    "another type": ("gpt2", {}, "qk_norm", None, r"norms \(q=rms, k=rms\) would be lost: transformers has no gpt2"),
    "sharp": ("llama", {}, RMS, 4.0, "the sharpness of 8 would be lost: .*--knee 16.*export --data"),
    "underflow": ("llama", {"rms_norm_eps": 1e-300}, RMS, None, r"would be multiplied by .*, beyond the range of"),
    "removed, cap": ("llama", {}, "qk_norm_cap", math.inf, "the cap of 50 would be lost"),
    "removed, values": ("llama", {}, "qkv_norm", math.inf, "expected norms of queries and keys alone"),
    "removed, latent": ("deepseek_v3", {}, "qk_norm", math.inf, "a norm of latent attention has"),
    "removed, clipped": ("olmo", {}, "qk_norm", math.inf, r"clips its .* \(clip_qkv=None\)"),
    "removed, biased": (
        "llama", {}, Scheme(q="rms", k="rms", bias=True), math.inf, "q_norm has a bias, and its projection has none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_inexact_exports_are_refused(tmp_path, case):
    model_type, settings, scheme, knee, message = REFUSED[case]
    options = {} if knee is None else {"knee": 1.0 if math.isinf(knee) else knee, "sharpness": 8.0}
    model = randomise(patch_model(sharp_model(model_type, **settings), scheme), **options)
    if knee == math.inf:
        set_knee(model, knee)
    model.save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=rf"ours \({model_type}, .*is not exported: .*{message}"):
        export_native(tmp_path / "ours", tmp_path / "theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("another eps", r"weight would be multiplied by .*Scheme\(..., eps=0.001\)"),
        ("another scale", r"q_norm.weight would be multiplied by"),
        ("henry, wide heads", r"q_norm.weight would be multiplied by"),
        ("removed", "the constant factors of its norms"),
    ],
)
def test_rounding_of_sixteen_bits_is_refused(tmp_path, case, message):
    patched = save_patched(tmp_path / "first", *CASES.get(case, CASES["llama"]), knee=4.0 * (case == "removed"))
    if case == "removed":
        set_knee(patched, math.inf)
    patched.to(torch.bfloat16).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=rf"not be exact in torch.bfloat16: .*{message}"):
        export_native(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


GAIN = "model.layers.1.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(GAIN), f"ours: .*1 norm tensors are missing from the weights, first '{GAIN}'"),
        (lambda t: t.update({GAIN: torch.full((16,), math.nan)}), f"ours: {GAIN} holds NaN or infinity"),
    ],
)
def test_damaged_weights_are_refused(tmp_path, change, message):
    save_patched(tmp_path / "ours", *CASES["llama"])
    edit(tmp_path / "ours", change)
    with pytest.raises(ValueError, match=message):
        export_native(tmp_path / "ours", tmp_path / "theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_only_complete_patched_causal_models_are_exported(tmp_path):
    sharp_model("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="is a plain llama, not a patched model"):
        export_native(tmp_path / "plain", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        export_native(tmp_path / "empty", tmp_path / "out")
    model = save_patched(tmp_path / "ours", *CASES["llama"])
    with pytest.raises(FileExistsError, match="is the source, or contains it"):
        export_native(tmp_path / "ours", tmp_path / "ours", overwrite=True)
    for options in ({"max_loss_increase": 1.0}, {"length": 8}):
        with pytest.raises(ValueError, match=r"is for a measurement, on text: pass data= \(--data TEXT\) as well"):
            export_native(tmp_path / "ours", tmp_path / "out", **options)
    configure(tmp_path / "ours", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="is quantised"):
        export_native(tmp_path / "ours", tmp_path / "out")
    AutoModelForSequenceClassification.from_config(model.config).save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match="score.weight would be lost or missing: a Qwen3ForCausalLM has other tensors"):
        export_native(tmp_path / "classifier", tmp_path / "out")
    assert not (tmp_path / "out").exists()
