"""A removal of norms that has reached its end is exported as the model without norms; any other is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_native import logits
from transformers import AutoModelForCausalLM

from hf_qknorm import Scheme, export_native, patch_model, remove_norms, set_knee
from hf_qknorm.model.attention import every_norm
from qknorm_tests.kneed import REMOVED, kneed
from qknorm_tests.tables import assert_near, error, randomise, sharp_model

RMS = Scheme(q="rms", k="rms")
# Beside the table of removals: a cap, another scale, fused projections.
CASES = {name: case for name, case in REMOVED.items() if not case[1].softcap} | {
    "fused": ("gpt2", Scheme(q="layer", k="layer", bias=True), {}),
    "capped": ("llama", dataclasses.replace(RMS, softcap=2.0), {}),
    "capped, fused": ("phi3", dataclasses.replace(RMS, softcap=2.0), {}),
    "scale": ("qwen2", dataclasses.replace(RMS, scale=0.3), {}),
}


def removed(case: str) -> Any:
    """A patched model whose norms have become constant factors."""
    model_type, scheme, settings = CASES[case]
    model: Any = randomise(patch_model(sharp_model(model_type, **settings), scheme), knee=1.0).eval()
    whole = logits(model)
    set_knee(model, math.inf)
    assert error(logits(model), whole) > 1e-2, "the norms' part can be seen"
    return model


@pytest.mark.parametrize("case", CASES)
def test_removed_norms_are_exported_as_no_norms(tmp_path, case):
    model = removed(case)
    model.save_pretrained(tmp_path / "ours")
    expected = logits(model)
    report = export_native(tmp_path / "ours", tmp_path / "theirs")
    native, info = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(info.values()), "no tensor is missing or unexpected"
    assert report.architecture == type(native).__name__
    assert type(native).__module__.startswith("transformers.")
    assert_near(logits(native.eval()), expected, 5e-6)
    if model.config.scheme.softcap:
        assert report.architecture == "VaultGemmaForCausalLM"
    else:
        folded = remove_norms(model)
        assert type(native) is type(folded)
        assert all(torch.equal(x, native.state_dict()[name]) for name, x in folded.state_dict().items())


def saved(folder: Path, model: Any, knee: float = math.inf) -> None:
    """Save a model whose knee is set without any measurement."""
    for norm in every_norm(model):
        norm.set_shape(norm.rounded(knee, 1.0, 8.0))
    model.save_pretrained(folder)


# A patched model, its knee, and the message of the refusal.
REFUSED: dict[str, tuple[Any, float, str]] = {
    "on its way": (
        lambda: patch_model(sharp_model("llama"), RMS), 4.0,
        "the sharpness of 8 would be lost.*export --data measures",
    ),
    "on its way, no target": (
        lambda: patch_model(sharp_model("gpt2"), "qk_norm"), 4.0, "or whose norms training has removed"
    ),
    "values": (lambda: kneed("layer"), math.inf, "expected norms of queries and keys alone"),
    "latent": (lambda: patch_model(sharp_model("deepseek_v3"), "qk_norm"), math.inf, "a norm of latent attention has"),
    "clipped": (lambda: patch_model(sharp_model("olmo"), "qk_norm"), math.inf, r"clips its .* \(clip_qkv=None\)"),
    "biased": (
        lambda: randomise(patch_model(sharp_model("llama"), dataclasses.replace(RMS, bias=True))), math.inf,
        "q_norm has a bias, and its projection has none",
    ),
    "a fused cap": (
        lambda: patch_model(sharp_model("gpt2"), "qk_norm_cap"), math.inf, "the cap of 50 would be lost: transformers",
    ),
    "bfloat16": (
        lambda: patch_model(sharp_model("llama"), RMS).bfloat16(), math.inf,
        "not be exact in bfloat16: the constant factors of its norms.*Save the checkpoint in float32 first",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_norms_are_refused(tmp_path, case):
    make, knee, message = REFUSED[case]
    saved(tmp_path / "ours", make(), knee)
    with pytest.raises(ValueError, match=rf"ours \(.*is not exported: .*{message}"):
        export_native(tmp_path / "ours", tmp_path / "theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
