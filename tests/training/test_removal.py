"""Norms taken away: what `remove_norms` folds, and what it refuses."""

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_qknorm import KneeSchedule, Scheme, calibrate, patch_model, remove_norms, set_knee, unpatch_model
from hf_qknorm.model.attention import patched_layers
from qknorm_tests.kneed import REMOVED, kneed, logits, plain
from qknorm_tests.short_runs import SaveAt, trainer
from qknorm_tests.tables import assert_near, error, fingerprint, make_batch, randomise, sharp_model
from qknorm_tests.tiny_towers import tiny_towers

BELT = Scheme(q="rms", k="rms", softcap=5.0)
TEXT = [make_batch(kind, labels=False) for kind in ("none", "left")]


@pytest.mark.parametrize("case", REMOVED)
def test_folded_norms_leave_what_constant_factors_gave(case):
    model_type, scheme, settings = REMOVED[case]
    plain_class = type(sharp_model(model_type, **settings))
    model: Any = randomise(patch_model(sharp_model(model_type, **settings), scheme), knee=1.0, sharpness=8.0).eval()
    whole = logits(model)
    set_knee(model, math.inf)
    before = logits(model)
    assert error(before, whole) > 1e-2
    assert remove_norms(model) is model
    assert_near(logits(model), before, 5e-6)
    left = Scheme(softcap=scheme.softcap)
    if left.changes_nothing:
        assert type(model) is plain_class
        assert not patched_layers(model)
    else:
        assert model.config.scheme == left


def test_a_trained_removal_ends_in_a_plain_llama(tmp_path):
    trainer(kneed(), tmp_path, KneeSchedule(target=math.inf), SaveAt(2)).train()
    resumed: Any = kneed()
    again = trainer(resumed, tmp_path, KneeSchedule(target=math.inf))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    before = logits(resumed.eval())
    remove_norms(resumed).save_pretrained(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded) is LlamaForCausalLM
    assert not [name for name in loaded.state_dict() if "q_norm" in name or "k_norm" in name]
    assert_near(logits(loaded.eval()), before, 2e-6)


def test_the_users_attention_backend_stays(tmp_path, caplog):
    opened().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert remove_norms(loaded).config._attn_implementation == "eager"
    capped = patch_model(sharp_model("llama"), BELT, attn_implementation="hf_qknorm_eager")
    calibrate(capped, TEXT, knee=4.0)
    set_knee(capped, math.inf)
    assert "unpatch_model" not in caplog.text
    assert remove_norms(capped).config._attn_implementation == "hf_qknorm_eager"
    assert caplog.text.count("the cap of 5 stays, with the model patched: unpatch_model(model) takes it off") == 1
    assert unpatch_model(capped).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("towers", [["vision_tower"], ["language_model"], ["vision_tower", "language_model"]])
def test_each_tower_keeps_its_own_cap(towers):
    model: Any = tiny_towers("llava")
    model.set_attn_implementation("eager")
    for tower in towers:
        patch_model(model, BELT, tower=tower)
    set_knee(randomise(model, knee=1.0, sharpness=8.0).eval(), math.inf)
    patched = [*patched_layers(model)]
    remove_norms(model)
    assert [*patched_layers(model)] == patched
    assert {layer.scheme for layer in patched_layers(model).values()} == {Scheme(softcap=5.0)}
    assert type(unpatch_model(model).config.text_config) is LlamaConfig


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sharp_norms_come_off_as_they_came(dtype, caplog):
    """Without training, the model is the one before the conversion up to rounding; the log has both losses."""
    model: Any = sharp_model("llama", dtype=dtype)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    calibrate(patch_model(model, BELT), TEXT, knee=4.0, sharpness=8)
    assert remove_norms(model, TEXT, max_loss_increase=0.5) is model
    assert "norms removed: the loss goes from" in caplog.text
    assert model.config.scheme == Scheme(softcap=5.0)
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, x in before.items():
        torch.testing.assert_close(after[name], x, rtol=2 * torch.finfo(dtype).eps, atol=0)


def opened(case: str = "rms") -> Any:
    model = kneed(case)
    set_knee(model, math.inf)
    return model


def biased() -> Any:
    model = randomise(patch_model(sharp_model("llama"), Scheme(q="rms", k="rms", bias=True)), knee=4.0)
    set_knee(model, math.inf)
    return model


def offloaded() -> Any:
    model = opened()
    model.model.layers[1].self_attn.k_proj.to("meta")
    return model


@pytest.mark.parametrize(
    ("make", "text", "message"),
    [
        (kneed, None, r"the norms still act \(knee 4\).*KneeSchedule\(target=math.inf\)"),
        (biased, None, "q_norm has a bias, and its projection has none"),
        (offloaded, None, "projections of model.layers.1.self_attn are offloaded"),
        (lambda: opened("layer"), None, "of queries and keys alone"),
        (plain, TEXT, "hold no mean length"),
        (lambda: patch_model(sharp_model("zamba"), "qk_norm"), TEXT, "share weights"),
        (lambda: sharp_model("llama"), TEXT, "is not patched"),
        (lambda: kneed("lp"), TEXT, "without its norms the model's loss goes from .* than max_loss_increase=-5"),
        (lambda: kneed(dtype=torch.bfloat16), TEXT, "without its norms .* than max_loss_increase=-5"),
    ],
)
def test_a_refused_removal_changes_nothing(make, text, message):
    model = make()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message):
        remove_norms(model, text, max_loss_increase=None if text is None else -5.0)
    assert fingerprint(model) == before


def test_models_made_in_inference_mode():
    with torch.inference_mode():
        model = sharp_model("llama")
    calibrate(patch_model(model, "qk_norm"), [make_batch("plain", labels=False)], knee=4.0)
    before = fingerprint(model)
    with pytest.raises(ValueError, match="more than max_loss_increase=-5"):
        remove_norms(model, [make_batch("plain", labels=False)], max_loss_increase=-5.0)
    assert fingerprint(model) == before
    set_knee(model, math.inf)
    expected = logits(model)
    assert_near(logits(remove_norms(model)), expected, 1e-4)


def test_wrapped_and_sharded_models_are_refused_unchanged(process_group):
    model = opened()
    wrappers = DistributedDataParallel(model), torch.compile(model)
    before = fingerprint(model)
    for wrapped in wrappers:
        with pytest.raises(TypeError, match=f"got a {type(wrapped).__name__}, .* give the model inside"):
            remove_norms(wrapped, TEXT)
        with pytest.raises(ValueError, match=f"{type(wrapped).__name__} is not patched: unpatch the model inside"):
            unpatch_model(wrapped)
    assert fingerprint(model) == before
    sharded = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    logits(sharded)  # leaves full parameters in place of the shards
    for change in (remove_norms, unpatch_model):
        with pytest.raises(ValueError, match="sharded by FSDP2"):
            change(sharded)
        assert isinstance(sharded, FSDPModule)


def test_opened_norms_are_finite_in_float16():
    assert logits(opened().half()).isfinite().all()
