"""`set_knee`: lengths are kept, and a knee of 0 is the plain scheme."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from hf_qknorm import KneeSchedule, set_knee
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.training.knee import LEVELS
from qknorm_tests.kneed import KNEE, SCHEMES, kneed, logits, norms, plain, without_gain, wrapped
from qknorm_tests.tables import assert_near, fingerprint
from qknorm_tests.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name


@torch.no_grad()
def mean_vectors(model: PreTrainedModel) -> dict[tuple[str, str], Tensor]:
    """Each norm's output for a vector of the calibration's mean length, without the bias."""
    found = {}
    for name, layer in patched_layers(model).items():
        for norm_name, norm in head_norms(layer).items():
            width = layer.head_dim
            x = torch.randn(width, generator=torch.Generator().manual_seed(0))
            x = x - x.mean() if norm.norm == "layer" else x
            x = x * (norm.mean_power() / x.abs().pow(norm.order).mean()) ** (1 / norm.order)
            heads = 1 if norm.weight is None or norm.weight.ndim == 1 else norm.weight.shape[0]
            y = norm(x.expand(1, 1, heads, width))
            found[name, norm_name] = y if norm.bias is None else y - norm.bias
    return found


@pytest.mark.parametrize("knee", [0.5, 20.0])
@pytest.mark.parametrize("case", SCHEMES)
def test_a_vector_of_the_mean_length_keeps_its_length(case, knee):
    model = kneed(case)
    before = mean_vectors(model)
    set_knee(model, knee)
    after = mean_vectors(model)
    for (name, norm_name), length in before.items():
        was, now = length, after[name, norm_name]
        if case == "scalar" and norm_name in ("q_norm", "k_norm"):  # the queries' gain takes both factors
            was, now = (vectors[name, "q_norm"] * vectors[name, "k_norm"].norm() for vectors in (before, after))
        assert_near(now, was, 1e-6, f"{name}.{norm_name}")
    assert model.config.scheme.knee == knee
    assert {layer.scheme.knee for layer in patched_layers(model).values()} == {knee}


@pytest.mark.parametrize("case", SCHEMES)
def test_many_small_changes_equal_one_and_can_be_undone(case):
    model, direct = kneed(case), kneed(case)
    start = logits(model)
    schedule = KneeSchedule(share=1.0, target=0.25)
    for step in range(41):
        set_knee(model, schedule.at(step, 40, KNEE))
    set_knee(direct, 0.25)
    assert_near(logits(model), logits(direct), 1e-5)
    assert not torch.allclose(logits(model), start, atol=1e-2)
    set_knee(model, KNEE)
    assert_near(logits(model), start, 1e-5)


@pytest.mark.parametrize("case", SCHEMES)
def test_a_knee_of_zero_is_the_plain_scheme(case, tmp_path):
    model, expected = kneed(case), plain(case)
    set_knee(model, 1.0)
    set_knee(model, 0.0)
    assert fingerprint(model) == fingerprint(expected)
    expected.load_state_dict(model.state_dict())
    assert torch.equal(logits(model), logits(expected))
    model.save_pretrained(tmp_path / "end")
    expected.save_pretrained(tmp_path / "plain")
    written, wanted = ((tmp_path / name / "config.json").read_text() for name in ("end", "plain"))
    assert json.loads(written) == json.loads(wanted)
    assert "knee" not in json.loads(written)["qk_norm"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gains_in_16_bits_do_not_accumulate_rounding_errors(dtype):
    model, direct = kneed("layer").to(dtype), kneed("layer").to(dtype)
    schedule = KneeSchedule(share=1.0)
    for step in range(LEVELS + 1):
        set_knee(model, schedule.at(step, LEVELS, KNEE))
    set_knee(direct, 0.0)
    for norm, other in zip(norms(model), norms(direct), strict=True):
        apart = (norm.weight.float() - other.weight.float()).abs() / other.weight.float().abs()
        assert apart.max() <= torch.finfo(dtype).eps  # the last bit of numbers halfway between two others
        assert (apart == 0).float().mean() > 0.9
    assert fingerprint(model) == fingerprint(plain("layer").to(dtype))
    assert list(model.state_dict()) == list(direct.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gains_that_are_loaded_leave_no_rounding_error_behind(dtype):
    model, other = kneed().to(torch.bfloat16), kneed().to(torch.bfloat16)
    set_knee(model, 1000.0)  # a rounding error as large as the other gains
    model.to(dtype).load_state_dict(other.to(dtype).state_dict())
    for each in (model, other):
        set_knee(each, 3.0)
    assert [norm.weight.tolist() for norm in norms(model)] == [norm.weight.tolist() for norm in norms(other)]


def test_an_unchanged_knee_reads_nothing_from_the_device(monkeypatch):
    model = kneed()
    monkeypatch.setattr(HeadNorm, "mean_power", None)  # a call would synchronise with the device
    set_knee(model, KNEE)
    schedule = KneeSchedule(share=0.5)
    way = [schedule.at(step, 10_000, KNEE) for step in range(10_000)]
    assert len(set(way)) == LEVELS + 1
    assert (way[0], way[4999] > 0, way[5000], way[-1]) == (KNEE, True, 0.0, 0.0)
    assert way == sorted(way, reverse=True)
    assert KneeSchedule(share=1.0, target=1.5).at(10, 10, KNEE) == 1.5
    assert schedule.at(1, 2, KNEE) == 0.0


@pytest.mark.parametrize("case", ["rms", "scalar"])
@pytest.mark.parametrize("knee", [0.0, 1.0])
def test_every_copy_of_a_norm_changes(case, knee):
    adapted, merged, original = wrapped(kneed(case)), wrapped(kneed(case)).merge_and_unload(), kneed(case)
    for model in (adapted, merged, original):
        set_knee(model, knee)
    assert_near(logits(adapted), logits(merged), 1e-5)
    assert not torch.allclose(logits(adapted), logits(original), atol=1e-2)
    with adapted.disable_adapter():
        assert_near(logits(adapted), logits(original), 1e-5)
    assert_near(logits(adapted.merge_and_unload()), logits(merged), 1e-5)


def test_gains_that_fsdp_shards(process_group):
    model, expected = kneed(), kneed()
    sharded: Any = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for knee in (1.0, 0.0):
        set_knee(sharded, knee)
        set_knee(expected, knee)
        for norm, other in zip(norms(sharded), norms(expected), strict=True):
            weight: Any = norm.weight
            assert torch.equal(weight.full_tensor(), other.weight)
    assert_near(logits(sharded), logits(expected), 1e-6)


def marked(model: PreTrainedModel) -> PreTrainedModel:
    patched_layers(model)["model.layers.1.self_attn"].q_norm.weight.ds_id = 0  # DeepSpeed's attribute under ZeRO-3
    return model


@pytest.mark.parametrize(
    ("make", "knee", "message"),
    [
        (lambda: tiny_model("llama"), 1.0, "LlamaForCausalLM is not patched: call patch_model"),
        (plain, 1.0, "has no knee to change, .* calibrate"),
        (without_gain, 0.0, 'gain="none": the norms have no gains'),
        (kneed, -1.0, "Scheme.knee=-1.0. is not possible: expected a finite number ≥ 0"),
        (kneed, float("nan"), "Scheme.knee=nan. is not possible"),
        (lambda: marked(kneed()), 1.0, "gains of model.layers.1.self_attn cannot be rescaled"),
        (lambda: kneed().to("meta"), 1.0, r"cannot be rescaled \(offloaded"),
    ],
)
def test_refusals(make, knee, message):
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}, str(model), model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        set_knee(model, knee)
    assert (str(model), model.config.to_dict()) == before[1:]
    for name, value in model.state_dict().items():
        assert value.is_meta or torch.equal(value, before[0][name]), name
