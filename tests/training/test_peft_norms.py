"""Norms that PEFT trains and saves beside an adapter: all code uses the copy in PEFT's wrapper."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_qknorm import Scheme, calibrate, patch_model, peft_modules_to_save, set_blend, set_knee
from hf_qknorm.calibration.calibrate import METHODS
from hf_qknorm.model import raw_heads
from hf_qknorm.model.attention import every_norm, head_norms, patched_layers
from hf_qknorm.model.knees import apply_knee, powers_of
from qknorm_tests.kneed import logits, wrapped
from qknorm_tests.tables import assert_near, blend_of, make_batch, randomise, sharp_model
from qknorm_tests.tiny import tiny_model

NAMES = {"qk_norm": ["k_norm", "q_norm"], "qkv_norm": ["k_norm", "q_norm", "v_norm"], "henry": ["q_norm"]}
SCHEME = Scheme(q="rms", k="layer", v="rms", gain="per_head", bias=True, softcap=5.0)
KNEED = replace(SCHEME, knee=4.0)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name


def patched(scheme: Scheme | str = SCHEME, model_type: str = "llama", **settings: Any) -> PreTrainedModel:
    return randomise(patch_model(sharp_model(model_type, **settings), scheme)).eval()


@pytest.mark.parametrize("preset", NAMES)
def test_the_names_of_norms_with_gains(preset):
    assert peft_modules_to_save(patch_model(tiny_model("llama"), preset)) == NAMES[preset]


def test_no_names_where_there_are_no_gains():
    assert peft_modules_to_save(patch_model(tiny_model("llama"), "soft_cap")) == []
    assert peft_modules_to_save(patch_model(tiny_model("llama"), Scheme(q="rms", gain="none"))) == []
    with pytest.raises(ValueError, match="LlamaForCausalLM is not patched"):
        peft_modules_to_save(tiny_model("llama"))


def test_full_paths_where_a_name_matches_other_modules():
    model = patched("qk_norm")
    model.model.layers[0].mlp.bank_norm = torch.nn.LayerNorm(4)  # peft matches the end of a path
    names = peft_modules_to_save(model)
    assert names == [f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_norm", "k_norm")]
    wrapped(model)
    assert type(model.model.layers[0].mlp.bank_norm) is torch.nn.LayerNorm


@pytest.mark.parametrize("backend", ["hf_qknorm_tiled", "hf_qknorm_eager"])
@pytest.mark.parametrize("preset", ["qk_norm_cap", "qkv_norm", "henry", "lp"])
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


def test_kernels_take_the_copy_in_use_unless_the_wrapper_is_watched():
    adapted = wrapped(patched())
    layer = next(iter(patched_layers(adapted).values()))
    wrapper, here = layer.q_norm, torch.device("cpu")
    assert raw_heads.as_norm(wrapper, here).gain is wrapper.modules_to_save["default"].weight
    with adapted.disable_adapter():
        assert raw_heads.as_norm(wrapper, here).gain is wrapper.original_module.weight
    handle = wrapper.register_forward_hook(lambda module, args, output: output * 2)
    assert raw_heads.as_norm(wrapper, here) is None
    handle.remove()


@pytest.mark.parametrize("preset", ["qk_norm_cap", "henry"])
def test_a_blend_reaches_every_copy(preset):
    adapted, plain = wrapped(patched(preset)), wrapped(patched(preset)).merge_and_unload()
    end, original = logits(adapted), logits(patched(preset))
    for blend in (0.0, 0.5):
        for model in (adapted, plain):
            set_blend(model, blend)
        assert blend_of(adapted) == blend
        assert_near(logits(adapted), logits(plain), 1e-5)
        assert not torch.allclose(logits(adapted), end, atol=1e-2)
    set_blend(adapted, 1.0)
    assert torch.equal(logits(adapted), end)
    with adapted.disable_adapter():
        assert_near(logits(adapted), original, 1e-5)
    assert not [name for name in adapted.state_dict() if name.endswith("blend")]


def knees(model: Any) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if name.endswith(".eps")}


def test_a_knee_reaches_every_copy_and_loads_with_the_adapter(tmp_path):
    patched(KNEED).save_pretrained(tmp_path / "base")
    adapted = wrapped(patched(KNEED))
    apply_knee(adapted, 2.0, powers_of(adapted))
    assert adapted.get_base_model().config.scheme.knee == 2
    assert len(knees(adapted)) == 12
    for name, eps in knees(adapted).items():
        assert torch.equal(eps, knees(adapted)[name.replace("original_module", "modules_to_save.default")])
    before, expected = knees(adapted), logits(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    assert torch.equal(logits(again.eval()), expected)
    merged = adapted.merge_and_unload()
    assert {float(eps) for eps in knees(merged).values()} == {float(eps) for eps in before.values()}
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(merged))


def test_preparing_for_training_leaves_knees_alone():
    expected = knees(patched(KNEED))
    model = patched(KNEED).to(torch.bfloat16)
    model.enable_input_require_grads()
    for prepared in (model, peft.prepare_model_for_kbit_training(model), wrapped(model).half().get_base_model()):
        names = {
            name.replace(".original_module", "").replace(".modules_to_save.default", "") for name in knees(prepared)
        }
        assert names == expected.keys()
        for name, eps in knees(prepared).items():
            own = name.replace(".original_module", "").replace(".modules_to_save.default", "")
            assert eps.dtype == torch.float32
            assert torch.equal(eps, expected[own])


@pytest.mark.parametrize("method", METHODS)
def test_calibration_sets_the_copies_and_not_the_originals(method):
    batches = [make_batch("left", labels=False) for _ in range(3)]
    plain, adapted = patched(), wrapped(patched(), fresh=True)
    before = {name: p.clone() for name, p in adapted.named_parameters() if "modules_to_save" not in name}
    expected = calibrate(plain, batches, method)
    report = calibrate(adapted, batches, method)
    assert report.chosen.loss == pytest.approx(expected.chosen.loss, rel=1e-5)
    gains = {name: p for name, p in plain.named_parameters() if ".self_attn." in name and "_norm." in name}
    assert len(gains) == 12
    for name, gain in gains.items():
        parent, _, kind = name.rpartition(".")
        copy = adapted.get_parameter(f"base_model.model.{parent}.modules_to_save.default.{kind}")
        torch.testing.assert_close(copy, gain, rtol=1e-4, atol=1e-5)
    for name, value in before.items():
        assert torch.equal(adapted.get_parameter(name), value), name


@pytest.mark.parametrize("scheme", ["qk_norm", "henry"])
def test_copies_keep_lengths_when_the_active_one_is_calibrated(scheme):
    batches = [make_batch("plain", labels=False) for _ in range(3)]
    model = patch_model(sharp_model("llama"), scheme).eval()
    calibrate(model, batches, knee=8.0)
    adapted, direct = wrapped(model, fresh=True), deepcopy(model)
    calibrate(adapted, batches, knee=0.5)
    set_knee(direct, 0.5)
    assert {norm.knee for norm in every_norm(adapted)} == {0.5}
    with adapted.disable_adapter():
        assert_near(logits(adapted), logits(direct), 1e-5)


def test_norm_tuning_is_calibrated_and_takes_knees():
    """PEFT's `LNTuningConfig` has a wrapper of its own, whose copies are the norms in use."""
    direct, batches = patched(KNEED), [make_batch("plain", labels=False) for _ in range(3)]
    before = logits(direct)
    tuned = peft.get_peft_model(patched(KNEED), peft.LNTuningConfig(target_modules=["q_norm", "k_norm", "v_norm"]))
    for model in (tuned.eval(), direct):
        calibrate(model, batches, knee=1.0)
        set_knee(model, 0.25)
    assert {norm.knee for norm in every_norm(tuned)} == {0.25}
    assert not torch.allclose(logits(direct), before, atol=1e-2)
    assert_near(logits(tuned), logits(direct), 1e-5)
    tuned.merge_adapter()
    assert head_norms(next(iter(patched_layers(tuned).values())))["q_norm"].knee == 0.25
    assert_near(logits(tuned), logits(direct), 1e-5)


def test_a_copy_keeps_its_own_mean():
    """An adapter that was trained on a base of another calibration."""
    adapted, batches = wrapped(patched(KNEED)), [make_batch("plain", labels=False) for _ in range(3)]
    for norm in every_norm(adapted)[::2]:
        norm.set_knee(norm.knee, 3.0)
    expected = [norm.mean_power() for norm in every_norm(adapted)]
    with pytest.raises(ValueError, match="the loss rises"):
        calibrate(adapted, batches, max_loss_increase=-9.0)
    assert [norm.mean_power() for norm in every_norm(adapted)] == pytest.approx(expected, rel=1e-6)
    set_knee(adapted, 1.0)
    assert [norm.mean_power() for norm in every_norm(adapted)] == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")
def test_calibration_changes_no_weights_under_adapters():
    folded = wrapped(patch_model(sharp_model("gpt2"), "qkv_norm"))
    with pytest.raises(ValueError, match="pre_norm=False scales projections, .* under adapters, .* calibrate before"):
        calibrate(folded, [make_batch("plain", labels=False)], "moments")
