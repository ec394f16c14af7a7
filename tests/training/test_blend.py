"""Blends: 0 is the unpatched model, 1 is the scheme, and checkpoints hold values between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from hf_qknorm import SCHEMES, BlendSchedule, CapSchedule, Scheme, patch_model, set_blend, set_cap, unpatch_model
from hf_qknorm.model.attention import patched_layers
from qknorm_tests.short_runs import Record, SaveAt, trainer
from qknorm_tests.tables import PAIRS, blend_of, fingerprint, make_batch, randomise, sharp_model
from qknorm_tests.tiny import tiny_model

BLENDED = [(model_type, name) for model_type, name in PAIRS if SCHEMES[name].pre_norm]
SCALED = Scheme(q="l2", k="rms", v="rms", gain="none", scale=2.0, softcap=30.0)


def logits(model: PreTrainedModel, kind: str = "plain") -> Tensor:
    batch = make_batch(kind)
    with torch.no_grad():
        return model.eval()(**batch).logits[batch["labels"] >= 0]


def patched(model_type: str, scheme: Scheme | str, **settings: Any) -> PreTrainedModel:
    model = sharp_model(model_type, **settings)
    return randomise(patch_model(model, scheme, attn_implementation="hf_qknorm"))


@pytest.mark.parametrize(("model_type", "scheme"), [*BLENDED, ("llama", SCALED), ("gpt2", SCALED)])
def test_blend_0_is_the_unpatched_model_and_blend_1_the_plain_scheme(model_type, scheme):
    base, model = patched(model_type, "none"), patched(model_type, scheme)
    end, before = logits(model), fingerprint(model)
    set_blend(model, 0.0)
    for kind in ("plain", "left", "packed"):
        assert torch.equal(logits(model, kind), logits(base, kind))
    set_blend(model, 0.5)
    assert blend_of(model) == 0.5 or not Scheme.of(scheme).norms
    set_blend(model, 1.0)
    assert torch.equal(logits(model), end)
    assert fingerprint(model) == before
    assert blend_of(model) == 1


def test_the_cap_by_blend():
    model = patched("llama", "qk_norm_cap")
    layers = patched_layers(model).values()
    for blend, cap in ((0.0, None), (0.2, None), (0.25, 200.0), (0.45, 200.0), (0.5, 100.0), (1.0, 50.0)):
        set_blend(model, blend)
        assert [layer.softcap for layer in layers] == [cap] * len(layers)
        assert model.config.scheme.softcap == model.config.attn_logit_softcapping == cap
    own = patched("gemma2", Scheme(softcap=20.0), attn_logit_softcapping=60.0)
    for blend, cap in ((0.0, 60.0), (0.6, 30.0), (1.0, 20.0)):  # 1/c is linear in the blend
        set_cap(own, blend)
        assert [layer.softcap for layer in patched_layers(own).values()] == pytest.approx([cap] * 2)


@pytest.mark.parametrize(("scheme", "put"), [("qk_norm_cap", set_blend), ("henry", set_blend), ("soft_cap", set_cap)])
@pytest.mark.parametrize("blend", [0.0, 0.3])
def test_checkpoints_hold_the_blend(tmp_path, scheme, put, blend):
    model = patched("llama", scheme)
    put(model, blend)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="hf_qknorm")
    assert blend_of(loaded) == pytest.approx(blend_of(model))
    assert torch.equal(logits(loaded), expected)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation != "sdpa" or scheme == "henry"
    put(model, 1.0)
    put(loaded, 1.0)
    assert torch.equal(logits(loaded), logits(model))
    assert "blend=" not in str(loaded)


def test_a_config_without_the_blend_of_its_weights_is_refused(tmp_path):
    model = patched("llama", "qk_norm")
    set_blend(model, 0.3)
    assert "blend=0.3" in str(model)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["qk_norm_blend"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"norm parameters are in the weights but not in the scheme.*blend"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("blend", [3, {}, {"norms": 1, "softcap": None}, {"norms": True, "softcap": -1}])
def test_a_malformed_blend_in_a_config_is_refused(tmp_path, blend):
    patched("llama", "qk_norm").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "qk_norm_blend": blend}))
    with pytest.raises(ValueError, match=r"qk_norm_blend is|softcap=-1"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_model_in_a_blend_can_be_unpatched():
    model = sharp_model("llama")
    expected = logits(model)
    before = fingerprint(model)
    patch_model(model, "henry")
    set_blend(model, 0.5)
    unpatch_model(model)
    assert fingerprint(model) == before
    assert torch.equal(logits(model), expected)


def run(model: PreTrainedModel, folder: Path, *callbacks: TrainerCallback, resume: str | None = None) -> Any:
    """Train, and return the blend and the cap before each step."""
    layer = next(iter(patched_layers(model).values()))
    record = Record(lambda model: (round(blend_of(model), 4), layer.softcap))
    trainer(model, folder, *callbacks, record).train(resume_from_checkpoint=resume)
    return record.seen


def test_a_resumed_blend_schedule_continues(tmp_path):
    whole, first, second = (patch_model(tiny_model("llama"), "qk_norm_cap") for _ in range(3))
    seen = run(whole, tmp_path / "whole", BlendSchedule(share=0.5))
    assert seen == [(0.0, None), (0.25, 200.0), (0.5, 100.0), (0.75, 50 / 0.75), *[(1.0, 50.0)] * 4]
    assert run(first, tmp_path / "parts", BlendSchedule(share=0.5), SaveAt(3)) == seen[:3]
    checkpoint = str(tmp_path / "parts" / "checkpoint-3")
    assert blend_of(AutoModelForCausalLM.from_pretrained(checkpoint)) == 0.75
    assert run(second, tmp_path / "parts", BlendSchedule(share=0.5), resume=checkpoint) == seen[3:]
    assert fingerprint(second) == fingerprint(whole)
    for name, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name


def test_cap_schedule(tmp_path):
    model = patch_model(tiny_model("llama"), "soft_cap")
    caps = [cap for _, cap in run(model, tmp_path, CapSchedule(share=1.0, shape="cosine"))]
    assert caps[0] is None
    assert caps[3:] == pytest.approx([200.0, 100.0, 100.0, 50 / 0.75, 50 / 0.75])
    assert model.config.scheme == SCHEMES["soft_cap"]
    assert model.config.qk_norm_blend is None


@pytest.mark.parametrize("schedule", [BlendSchedule, CapSchedule])
def test_the_best_weights_are_not_loaded(schedule, tmp_path):
    made = trainer(patched("llama", "qk_norm_cap"), tmp_path, schedule())
    made.args.load_best_model_at_end = True
    with pytest.raises(ValueError, match=f"weights for another .*than the one that {schedule.__name__} has set"):
        made.train()


@pytest.mark.parametrize(
    ("scheme", "act", "message"),
    [
        ("qk_norm", lambda m: set_blend(m, 1.5), "blend=1.5: expected a number from 0"),
        ("qk_norm", lambda m: set_cap(m, 0.5), "has no cap to bring in"),
        ("qkv_norm", lambda m: set_blend(m, 0.0), "pre_norm=False removed the norm"),
        (Scheme(v="rms", scale=1.0), lambda m: set_blend(m, 0.0), "can't bring in scale=1 without a norm on queries"),
        ("qk_norm_cap", lambda m: (set_cap(m, 0.5), set_blend(m, 0.5)), "moves the cap by itself"),
        ("qk_norm_cap", lambda m: (set_blend(m, 0.5), set_cap(m, 0.5)), "moves the cap as well"),
    ],
)
def test_refusals(scheme, act, message):
    model = patched("llama", scheme)
    with pytest.raises(ValueError, match=message):
        act(model)
