"""Adapters: norms get the projections' output with the adapter, and norms that PEFT trains are the ones in use."""

from typing import Any

import peft
import pytest
import torch
from transformers import PreTrainedModel, TrainerState

from hf_qknorm import (
    FAMILIES,
    SCHEMES,
    KneeSchedule,
    Scheme,
    calibrate,
    patch_model,
    peft_modules_to_save,
    set_knee,
    unpatch_model,
)
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.model.derived import QKNormModel
from hf_qknorm.model.knees import knee_of
from qknorm_tests.adapters import adapted
from qknorm_tests.covering import covering
from qknorm_tests.kneed import kneed, knees_of, logits, wrapped
from qknorm_tests.tables import MODEL_TYPES, applies, assert_near, fingerprint, make_batch, randomise, sharp_model
from qknorm_tests.tiny import tiny_model

NAMES: dict[Any, list[str]] = {
    "qkv_norm": ["k_norm", "q_norm", "v_norm"],
    "henry": ["k_norm", "q_norm"],
    "soft_cap": [],
    Scheme(q="rms", gain="none"): ["q_norm"],
}
LN = peft.LNTuningConfig(target_modules=["q_norm", "k_norm"])
SCHEME = Scheme(q="rms", k="layer", v="rms", gain="per_head", bias=True, softcap=5.0)

# norms wherever they apply: merging is exact only if they get the adapter's output
MODELS = covering(
    MODEL_TYPES,
    ("qk_norm_cap", "qkv_norm", "soft_cap"),
    fits=lambda t, name: applies(t, SCHEMES[name]) and (name != "soft_cap" or bool(FAMILIES[t].own_norms)),
    strength=1,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing:FutureWarning",  # peft uses the old name
    "ignore:fan_in_fan_out:UserWarning",
)


def patched(scheme: Scheme | str = SCHEME, model_type: str = "llama", **settings: Any) -> PreTrainedModel:
    return randomise(patch_model(sharp_model(model_type, **settings), scheme)).eval()


def test_the_names_of_norms():
    for preset, names in NAMES.items():
        assert peft_modules_to_save(patch_model(tiny_model("llama"), preset)) == names
    with pytest.raises(ValueError, match="LlamaForCausalLM is not patched"):
        peft_modules_to_save(tiny_model("llama"))


@pytest.mark.parametrize("scheme", ["qk_norm", "soft_cap"])
def test_a_model_is_not_unpatched_under_its_adapters(scheme):
    model = patched(scheme)
    outer = wrapped(model)
    before, expected = fingerprint(model), logits(outer)
    with pytest.raises(ValueError, match="this model has adapters, .* merge and unload them first"):
        unpatch_model(model)
    assert fingerprint(model) == before
    assert torch.equal(logits(outer), expected)
    assert type(unpatch_model(outer.merge_and_unload())) is type(tiny_model("llama"))


def test_full_paths_where_a_name_matches_other_modules():
    model = patched("qk_norm")
    model.model.layers[0].mlp.bank_norm = torch.nn.LayerNorm(4)  # peft matches the end of a path
    names = peft_modules_to_save(model)
    assert names == [f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_norm", "k_norm")]
    wrapped(model)
    assert type(model.model.layers[0].mlp.bank_norm) is torch.nn.LayerNorm


@pytest.mark.parametrize(("preset", "backend"), [("qkv_norm", "hf_qknorm_tiled"), ("henry", "hf_qknorm_eager")])
def test_the_adapters_copy_of_a_norm_is_used_and_merged(preset, backend):
    model = patched(preset)
    before = logits(model)
    model.set_attn_implementation(backend)
    adapted = wrapped(model)
    expected = logits(adapted)
    assert not torch.allclose(expected, before, atol=1e-2)
    with adapted.disable_adapter():
        assert_near(logits(adapted), before, 1e-5)
    copies = {name: p.clone() for name, p in adapted.named_parameters() if "modules_to_save" in name}
    merged = adapted.merge_and_unload()
    assert_near(logits(merged), expected, 1e-5)
    assert {type(m) for m in merged.modules() if type(m).__module__.startswith("peft")} == set()
    for name, value in copies.items():
        path = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
        assert torch.equal(merged.get_parameter(path), value)


def test_casts_leave_knees_alone():
    expected = knees_of(kneed())
    model = kneed().to(torch.bfloat16)
    model.enable_input_require_grads()
    for prepared in (model, peft.prepare_model_for_kbit_training(model), wrapped(model).half().get_base_model()):
        for name, knee in knees_of(prepared).items():
            own = name.replace(".original_module", "").replace(".modules_to_save.default", "")
            assert torch.equal(knee.float(), expected[own])


def test_calibration_sets_the_copies_and_not_the_originals():
    batches = [make_batch("left", labels=False) for _ in range(3)]
    plain, adapted = patched(), wrapped(patched(), fresh=True)
    before = {name: p.clone() for name, p in adapted.named_parameters() if "modules_to_save" not in name}
    expected = calibrate(plain, batches, knee=2)
    assert calibrate(adapted, batches, knee=2).chosen.loss == pytest.approx(expected.chosen.loss, rel=1e-5)
    gains = {name: p for name, p in plain.named_parameters() if ".self_attn." in name and "_norm." in name}
    assert len(gains) == 12
    for name, gain in gains.items():
        parent, _, kind = name.rpartition(".")
        copy = adapted.get_parameter(f"base_model.model.{parent}.modules_to_save.default.{kind}")
        torch.testing.assert_close(copy, gain, rtol=1e-4, atol=1e-5)
    for name, value in before.items():
        assert torch.equal(adapted.get_parameter(name), value), name
    with adapted.disable_adapter():
        assert knee_of(adapted) == 0


def test_norm_tuning_is_calibrated_and_takes_knees():
    """PEFT's `LNTuningConfig` has a wrapper of its own, whose copies are the norms in use."""
    direct, batches = kneed(), [make_batch("plain", labels=False) for _ in range(3)]
    before = logits(direct)
    tuned = peft.get_peft_model(kneed(), LN)
    for model in (tuned.eval(), direct):
        calibrate(model, batches, knee=1.0)
        set_knee(model, 0.25)
    assert not torch.allclose(logits(direct), before, atol=1e-2)
    assert_near(logits(tuned), logits(direct), 1e-5)
    with tuned.disable_adapter():
        assert torch.equal(logits(tuned), before)
    tuned.merge_adapter()
    assert head_norms(next(iter(patched_layers(tuned).values())))["q_norm"].ratio == pytest.approx(0.25, rel=0.2)
    for knee in (0.25, 1.0):
        for model in (tuned, direct):
            set_knee(model, knee)
        assert_near(logits(tuned), logits(direct), 1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: set_knee(x, 1.0),
        lambda x: calibrate(x, [make_batch("plain")], knee=1),
        lambda x: KneeSchedule().on_train_begin(None, TrainerState(), None, model=x),
    ],
)
@pytest.mark.parametrize(
    "add", [peft.get_peft_model, lambda model, config: peft.inject_adapter_in_model(config, model)]
)
def test_norms_that_no_adapter_holds_are_refused(add, change):
    """The adapter's file would lead to the base with its old knee."""
    model = add(kneed(), peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["q_norm"]))
    before = knees_of(model)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.k_norm is in no adapter, .*=peft_modules_to_save"):
        change(model)
    assert all(torch.equal(knee, before[name]) for name, knee in knees_of(model).items())


def test_an_adapter_holds_the_knees_of_norms_without_gains(tmp_path):
    adapted = wrapped(kneed("scalar"))
    set_knee(adapted, 0.5)
    adapted.save_pretrained(tmp_path)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(kneed("scalar"), tmp_path).eval()), logits(adapted))


def test_a_refused_calibration_restores_every_knee():
    adapted, batches = wrapped(kneed()), [make_batch("plain", labels=False) for _ in range(3)]
    expected = knees_of(adapted)
    with pytest.raises(ValueError, match="more than max_loss_increase=-9"):
        calibrate(adapted, batches, max_loss_increase=-9.0)
    assert all(torch.equal(knee, expected[name]) for name, knee in knees_of(adapted).items())


def test_calibration_changes_no_weights_under_adapters():
    folded = wrapped(patch_model(sharp_model("gpt2"), "qkv_norm"))
    with pytest.raises(ValueError, match="pre_norm=False scales projections, .* under adapters, .* calibrate before"):
        calibrate(folded, [make_batch("plain", labels=False)])


@pytest.mark.parametrize(("model_type", "preset"), MODELS)
@torch.no_grad()
def test_merging_is_exact(model_type, preset):
    model = adapted(randomise(patch_model(sharp_model(model_type), preset)))
    batch = make_batch("left")
    expected = model(**batch).logits
    with model.disable_adapter():
        assert not torch.allclose(model(**batch).logits, expected, atol=1e-2), "the adapters matter"
    merged = model.merge_and_unload()
    assert isinstance(merged, QKNormModel)
    assert_near(merged(**batch).logits, expected, 1e-5)
