"""A calibration with `exportable` gives a native model with the same bits, whose weights K-quants can hold."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import Scheme, calibrate, convert_checkpoint, export_native, patch_model, unpatch_model
from hf_qknorm.calibration.knees import EXPORT_KNEE
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.ops.cpu import norm_rope
from qknorm_tests.tables import make_batch, sharp_model

RMS = Scheme(q="rms", k="rms")
EPS = {"rms_norm_eps": 1e-6}
MODELS: dict[str, tuple[dict[str, Any], Scheme]] = {
    "llama": (EPS | {"attention_bias": True, "head_dim": 32}, RMS),
    "qwen2": ({"use_sliding_window": False, "rms_norm_eps": 1e-5}, RMS),
    "mistral": ({}, RMS),
    "mixtral": ({}, RMS),
}


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    """C++ sums a row's squares in another order than Qwen 3's norms."""
    monkeypatch.setattr(norm_rope, "why_not", lambda heads: "compared by bits")


def texts() -> list[Tensor]:
    return [make_batch("plain")["input_ids"]]


@pytest.mark.parametrize("model_type", MODELS)
def test_the_export_has_the_same_bits(tmp_path, model_type):
    settings, scheme = MODELS[model_type]
    model = patch_model(sharp_model(model_type, **settings), scheme)
    report = calibrate(model, texts(), exportable=True)
    assert (report.knee, report.sharpness) == (EXPORT_KNEE, 1)
    assert report.scheme.eps == model.config.scheme.eps == model.config.rms_norm_eps
    for layer in patched_layers(model).values():
        for norm in head_norms(layer).values():
            power = math.log(norm.epsilon / model.config.rms_norm_eps, 4)
            assert power == pytest.approx(round(power), abs=1e-6)
            assert power > 0
            assert norm.shape.power == 0  # the gains carry the length
    model.save_pretrained(tmp_path / "ours")
    assert "do not train it with Adam" in str(export_native(tmp_path / "ours", tmp_path / "theirs"))
    tokens = make_batch("plain")["input_ids"]
    for name in ("ours", "theirs"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, attn_implementation="sdpa")
        with torch.no_grad():
            torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
            torch.save(loaded(tokens).logits, tmp_path / f"{name}.pt")
    assert torch.equal(torch.load(tmp_path / "ours.pt"), torch.load(tmp_path / "theirs.pt"))


@pytest.mark.parametrize(
    ("dtype", "last"),
    [(torch.bfloat16, None), (torch.float16, 2.0**-10), (torch.float16, 3 * 2.0**-24)],
    ids=["bfloat16", "held", "rounded"],
)
@torch.no_grad()
def test_sixteen_bits_are_exported_without_rounding_or_refused(dtype, last, tmp_path):
    """Computed in float32, the checkpoint and its export give the same bits."""
    model = patch_model(sharp_model("llama", **EPS), RMS)
    calibrate(model, texts(), exportable=True)
    for layer in patched_layers(model).values() if last else ():
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
            projection.weight.mul_(2**10).round_().div_(2**10)  # multiples of 2⁻¹⁰, in a format that ends at 2⁻²⁴
        layer.k_proj.weight[-1, -1] = last
    model.to(dtype).save_pretrained(tmp_path / "ours")
    if last and last < 2**-10:
        with pytest.raises(ValueError, match=r"exact in torch.float16: .*self_attn.k_proj.weight would be multipl"):
            export_native(tmp_path / "ours", tmp_path / "theirs")
        assert not (tmp_path / "theirs").exists()
        return
    export_native(tmp_path / "ours", tmp_path / "theirs")
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name, **options) for name in ("ours", "theirs"))
    assert torch.equal(one(texts()[0]).logits, other(texts()[0]).logits)


def as_q6_k(weight: Tensor) -> Tensor:
    """The weights of llama.cpp's Q6_K: for 256 a scale in fp16, for 16 one of 8 bits, and 6 bits each."""
    blocks = weight.reshape(-1, 16, 16)
    scales = blocks.gather(2, blocks.abs().argmax(2, keepdim=True)) / -32
    largest = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    common = (largest / -128).half().float()
    steps = (scales / common).round().clamp(-128, 127).nan_to_num() * common
    return ((blocks / steps).round().clamp(-32, 31).nan_to_num() * steps).reshape(weight.shape)


def test_k_quants_hold_the_projections_of_a_knee(tmp_path, shared):
    source = shared / "checkpoints/llama-shakespeare"
    text = (shared / "data/tinyshakespeare.txt").read_text()[:8_000]
    options = {"data": [text], "knee": 16.0, "max_tokens": 1024, "standalone": False}
    convert_checkpoint(source, tmp_path / "ours", "qk_norm", exportable=True, **options)
    export_native(tmp_path / "ours", tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    for name in (name for name in ours if "q_proj" in name or "k_proj" in name):
        before, after = ((as_q6_k(x[name]) - x[name]).norm() / x[name].norm() for x in (ours, theirs))
        assert theirs[name].abs().max() < ours[name].abs().max() / 8
        assert after <= 1.1 * before
        least = theirs[name] * 2.0 ** -round(math.log2(ours[name].norm() / theirs[name].norm()))
        assert (as_q6_k(least) - least).norm() / least.norm() > 1.1 * before, "without the shared scale it would not"
    tokens = AutoTokenizer.from_pretrained(source)(text[:400], return_tensors="pt")
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("ours", "theirs"))
    one.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(one(**tokens).logits, other(**tokens).logits)


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        (RMS, {"knee": "auto"}, "knee=auto is not exportable: expected a number above 0, as knee=16"),
        (RMS, {"knee": 0.0}, "knee=0.0 is not exportable"),
        (replace(RMS, softcap=50.0), {"knee": 4.0}, r"norms \(q=rms, k=rms\) or the cap of 50 would be lost"),
        (replace(RMS, gain="per_head"), {}, "gains per head would be lost"),
        (RMS, {"sharpness": 8}, "sharpness=8: expected 1 with exportable"),
    ],
)
def test_what_has_no_native_counterpart_is_refused_before_the_pass(scheme, options, message):
    model = patch_model(sharp_model("llama", **EPS), scheme)
    with pytest.raises(ValueError, match=message):
        calibrate(model, texts(), exportable=True, **options)
    assert model.config.scheme == scheme


def test_norms_of_another_eps_do_not_load_it():
    """The knee in the weights is relative to eps, which the calibration sets to the model's own."""
    made, other = (patch_model(sharp_model("llama", rms_norm_eps=1e-5), RMS) for _ in range(2))
    calibrate(made, texts(), exportable=True)
    with pytest.raises(RuntimeError, match=r"q_norm\.knee is for an export, .* patch with eps=1e-05"):
        other.load_state_dict(made.state_dict(), strict=False)
    patch_model(unpatch_model(other), replace(RMS, eps=1e-5)).load_state_dict(made.state_dict())


def test_a_failed_calibration_restores_eps():
    model = patch_model(sharp_model("llama", rms_norm_eps=1e-5), RMS)
    with pytest.raises(ValueError, match="the loss rises"):
        calibrate(model, texts(), exportable=True, max_loss_increase=-9.0)
    assert model.config.scheme == RMS
    assert {norm.eps for layer in patched_layers(model).values() for norm in head_norms(layer).values()} == {1e-6}
