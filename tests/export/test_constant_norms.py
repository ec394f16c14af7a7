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

from hf_qknorm import Scheme, cli, export_native, patch_model, remove_norms, set_knee, start_removal
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.model.knees import NO_NORM
from qknorm_tests.kneed import REMOVED, kneed, qwen3
from qknorm_tests.tables import assert_near, error, make_batch, randomise, sharp_model

TEXT = [make_batch(kind, labels=False) for kind in ("none", "left")]
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
    model: Any = randomise(patch_model(sharp_model(model_type, **settings), scheme)).eval()
    whole = logits(start_removal(model, TEXT))
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


def test_a_qwen3_becomes_a_llama_from_the_command_line(tmp_path, capsys):
    model: Any = start_removal(qwen3(), TEXT)
    set_knee(model, math.inf)
    model.save_pretrained(tmp_path / "ours", max_shard_size="60KB")
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    assert "theirs: LlamaForCausalLM, which transformers loads without hf_qknorm" in capsys.readouterr().out
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert_near(logits(native.eval()), logits(model), 5e-6)
    assert not [name for name in native.state_dict() if "norm.weight" in name and "self_attn" in name]


def saved(folder: Path, model: Any, knee: float = NO_NORM) -> None:
    """Save a model whose knee is set without any measurement."""
    for layer in patched_layers(model).values():
        for norm in head_norms(layer).values():
            norm.set_knee(knee, 1.0)
        layer.scheme = dataclasses.replace(layer.scheme, knee=knee)
    model.config.set_scheme(dataclasses.replace(model.config.scheme, knee=knee))
    model.save_pretrained(folder)


# A patched model, its knee, and the message of the refusal.
REFUSED: dict[str, tuple[Any, float, str]] = {
    "on its way": (
        lambda: patch_model(sharp_model("llama"), dataclasses.replace(RMS, sharpness=8)), 4.0,
        "the sharpness of 8 would be lost.*export --texts measures",
    ),
    "on its way, no target": (
        lambda: patch_model(sharp_model("gpt2"), "qk_norm"), 4.0, "or whose norms training has removed"
    ),
    "values": (lambda: kneed("layer"), NO_NORM, "expected norms of queries and keys alone"),
    "latent": (lambda: patch_model(sharp_model("deepseek_v3"), "qk_norm"), NO_NORM, "a norm of latent attention has"),
    "clipped": (lambda: patch_model(sharp_model("olmo"), "qk_norm"), NO_NORM, r"clips its .* \(clip_qkv=None\)"),
    "stored under another name": (
        lambda: patch_model(sharp_model("zamba2"), RMS), NO_NORM,
        "q_proj.weight is not stored under that name: .*in place of an export, remove_norms",
    ),
    "biased": (
        lambda: randomise(patch_model(sharp_model("llama"), dataclasses.replace(RMS, bias=True))), NO_NORM,
        "q_norm has a bias, and its projection has none",
    ),
    "a fused cap": (
        lambda: patch_model(sharp_model("gpt2"), "qk_norm_cap"), NO_NORM, "the cap of 50 would be lost: transformers",
    ),
    "bfloat16": (
        lambda: patch_model(sharp_model("llama"), RMS).bfloat16(), NO_NORM,
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
