"""A knee that changes while a model trains: lengths are kept, the end is the plain scheme, and runs resume."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from short_runs import StopAt, assert_equal_weights, trainer
from tables import assert_near, fingerprint, make_batch, randomise, sharp_model
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback

from hf_qknorm import KneeSchedule, Scheme, export_native, patch_model, peft_modules_to_save, set_knee
from hf_qknorm.attention import head_norms, patched_layers
from hf_qknorm.knee import powers_of, put_knee
from hf_qknorm.norms import HeadNorm
from hf_qknorm.testing import tiny_model
from hf_qknorm.training import knee as knees

RMS = Scheme(q="rms", k="rms")
SCHEMES = {
    "rms": ("llama", RMS),
    "layer": ("gpt2", Scheme(q="layer", k="layer", v="layer", softcap=5.0)),
    "l2": ("llama", Scheme(q="l2", k="rms", v="l2", gain="per_head", bias=True)),
    "lp": ("llama", Scheme(q="lp", k="lp", gain="per_head", p=3.0)),
    "scalar": ("llama", Scheme(q="lp", k="rms", v="rms", gain="scalar", p=3.0, scale=1.0)),
    "keys": ("llama", Scheme(k="rms", gain="scalar")),
}
KNEE = 4.0

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name


def kneed(case: str = "rms", knee: float = KNEE, **settings: Any) -> PreTrainedModel:
    """A patched model with a knee; every norm has gains and a mean |x|ᵖ of its own."""
    model_type, scheme = SCHEMES[case]
    model = randomise(patch_model(sharp_model(model_type, **settings), dataclasses.replace(scheme, knee=knee)))
    powers = {key: 0.1 + 0.2 * i for i, key in enumerate(powers_of(model))}
    put_knee(model, knee, powers)
    return model.eval()


def plain(case: str = "rms", **settings: Any) -> PreTrainedModel:
    model_type, scheme = SCHEMES[case]
    return patch_model(sharp_model(model_type, **settings), scheme).eval()


def norms(model: Any) -> list[HeadNorm]:
    return [norm for layer in patched_layers(model).values() for norm in head_norms(layer).values()]


@torch.no_grad()
def logits(model: Any, kind: str = "left") -> Tensor:
    return model(**make_batch(kind, labels=False)).logits


@torch.no_grad()
def mean_vectors(model: PreTrainedModel) -> dict[tuple[str, str], Tensor]:
    """What each norm makes of a vector of the calibration's mean length, without the bias."""
    found = {}
    for name, layer in patched_layers(model).items():
        for norm_name, norm in head_norms(layer).items():
            width = layer.head_dim
            x = torch.randn(width, generator=torch.Generator().manual_seed(0))
            x = x - x.mean() if norm.norm == "layer" else x
            x = x * (norm.power / x.abs().pow(norm.order).mean()) ** (1 / norm.order)
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
        if case == "scalar" and norm_name in ("q_norm", "k_norm"):  # the queries' gain is that of both
            was, now = (vectors[name, "q_norm"] * vectors[name, "k_norm"].norm() for vectors in (before, after))
        assert_near(now, was, 1e-6, f"{name}.{norm_name}")
    assert model.config.scheme.knee == knee
    assert {layer.scheme.knee for layer in patched_layers(model).values()} == {knee}


@pytest.mark.parametrize("case", SCHEMES)
def test_many_small_steps_lead_where_one_does_and_back(case):
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
def test_the_end_is_the_plain_scheme(case, tmp_path):
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


def test_the_end_is_exported_as_qwen3(tmp_path):
    model = kneed("rms", rms_norm_eps=1e-6)
    model.save_pretrained(tmp_path / "kneed")
    set_knee(model, 0.0)
    model.save_pretrained(tmp_path / "end")
    export_native(tmp_path / "end", tmp_path / "qwen3")
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen3")
    assert native.config.model_type == "qwen3"
    assert_near(logits(native), logits(model), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gains_in_16_bits_gather_no_roundings(dtype):
    model, direct = kneed("layer").to(dtype), kneed("layer").to(dtype)
    schedule = KneeSchedule(share=1.0)
    for step in range(knees.LEVELS + 1):
        set_knee(model, schedule.at(step, knees.LEVELS, KNEE))
    set_knee(direct, 0.0)
    for norm, other in zip(norms(model), norms(direct), strict=True):
        apart = (norm.weight.float() - other.weight.float()).abs() / other.weight.float().abs()
        assert apart.max() <= torch.finfo(dtype).eps  # the last bit of those that lie on the border of a rounding
        assert (apart == 0).float().mean() > 0.9
    assert fingerprint(model) == fingerprint(plain("layer").to(dtype))
    assert list(model.state_dict()) == list(direct.state_dict())


def test_where_the_knee_stays_nothing_is_read(monkeypatch):
    model = kneed()
    monkeypatch.setattr(knees, "powers_of", None)  # it would wait for the device
    set_knee(model, KNEE)
    schedule = KneeSchedule(share=0.5)
    way = [schedule.at(step, 10_000, KNEE) for step in range(10_000)]
    assert len(set(way)) == knees.LEVELS + 1
    assert (way[0], way[4999] > 0, way[5000], way[-1]) == (KNEE, True, 0.0, 0.0)
    assert way == sorted(way, reverse=True)
    assert KneeSchedule(share=1.0, target=1.5).at(10, 10, KNEE) == 1.5
    assert schedule.at(1, 2, KNEE) == 0.0


def test_a_knee_that_goes_down_compiles_into_two_programs():
    model = kneed("rms")
    programs = CompileCounter()
    compiled = torch.compile(model, backend=programs, fullgraph=True)
    schedule, seen = KneeSchedule(share=1.0), []
    for step in range(9):
        set_knee(model, schedule.at(step, 8, KNEE))
        compiled(**make_batch("plain"))
        seen.append(logits(model))
    assert not torch.equal(seen[1], seen[0])
    assert programs.frame_count == 2  # with a knee, and without
    torch.compiler.reset()


class Record(TrainerCallback):
    """The knee that each step was trained with."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(knees.knee_of(kwargs["model"]))


def run(model: PreTrainedModel, folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    made = trainer(model, folder, save_strategy="steps", save_steps=1, **options)
    for callback in callbacks:
        made.add_callback(callback)
    return made


WAY = [4.0, 2.25, 1.0, 0.25, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("stop", [3, 6])
def test_a_run_resumes_where_it_was(stop, tmp_path):
    whole, record = kneed(), Record()
    run(whole, tmp_path / "whole", KneeSchedule(), record).train()
    assert record.seen == WAY
    run(kneed(), tmp_path / "parts", KneeSchedule(), StopAt(stop)).train()
    checkpoint = tmp_path / "parts" / f"checkpoint-{stop}"
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert loaded.config.scheme.knee == WAY[stop]
    for resumed in (kneed(), loaded):  # as the run began, and as its checkpoint was saved
        record = Record()
        run(resumed, tmp_path / "parts", KneeSchedule(), record).train(resume_from_checkpoint=str(checkpoint))
        assert record.seen == WAY[stop:]
        assert resumed.config.scheme == whole.config.scheme == RMS
        assert list(resumed.state_dict()) == list(whole.state_dict())
        assert_equal_weights(resumed, whole)


def test_a_checkpoint_from_the_midst_loads_as_it_was(tmp_path):
    model = kneed()
    run(model, tmp_path, KneeSchedule(share=1.0, target=1.0), StopAt(4)).train()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert 1 < knees.knee_of(loaded) == knees.knee_of(model) < KNEE
    assert torch.equal(logits(loaded.eval()), logits(model.eval()))
    assert powers_of(loaded) == pytest.approx(powers_of(kneed()))


def wrapped(model: PreTrainedModel) -> peft.PeftModel:
    """A model with an adapter, and with copies of its norms that differ from the originals."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, init_lora_weights=False, modules_to_save=peft_modules_to_save(model))
    adapted = peft.get_peft_model(model, config).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return adapted


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


def test_gains_that_fsdp_1_flattens(process_group):
    model, expected = kneed(), kneed()
    sharded = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    set_knee(sharded, 1.0)
    set_knee(expected, 1.0)
    assert_near(logits(sharded), logits(expected), 1e-6)
    hidden = FullyShardedDataParallel(kneed(), use_orig_params=False, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"gains of .* are not here .* with use_orig_params=True"):
        set_knee(hidden, 1.0)


def marked(model: PreTrainedModel) -> PreTrainedModel:
    patched_layers(model)["model.layers.1.self_attn"].q_norm.weight.ds_id = 0  # as DeepSpeed marks those of ZeRO-3
    return model


def without_gain() -> PreTrainedModel:
    return patch_model(tiny_model("llama"), Scheme(q="rms", k="rms", gain="none", knee=1.0))


@pytest.mark.parametrize(
    ("make", "knee", "message"),
    [
        (lambda: tiny_model("llama"), 1.0, "LlamaForCausalLM is not patched: call patch_model"),
        (plain, 1.0, "has no knee to change, .* calibrate"),
        (without_gain, 0.0, 'gain="none": the norms have no gains'),
        (kneed, -1.0, "Scheme.knee=-1.0. is not possible: expected a finite number ≥ 0"),
        (kneed, float("nan"), "Scheme.knee=nan. is not possible"),
        (lambda: marked(kneed()), 1.0, "gains of model.layers.1.self_attn are not here to be rescaled"),
        (lambda: kneed().to("meta"), 1.0, r"are not here to be rescaled \(offloaded"),
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


def test_refused_settings():
    with pytest.raises(ValueError, match=r"share=0 of the run: expected more than 0"):
        KneeSchedule(share=0)
    for target in (-1.0, float("inf")):
        with pytest.raises(ValueError, match=f"target={target}: expected a knee"):
            KneeSchedule(target=target)


@pytest.mark.parametrize(
    ("make", "best", "message"),
    [
        (plain, False, "the model's knee is 0, and KneeSchedule lowers it to 0: calibrate"),
        (without_gain, False, 'gain="none"'),
        (lambda: wrapped(kneed()), False, "an adapter's checkpoint does not hold the knee"),
        (kneed, True, "load_best_model_at_end puts weights of another knee"),
    ],
)
def test_runs_that_are_refused_when_they_begin(make, best, message, tmp_path):
    made = run(make(), tmp_path, KneeSchedule())
    made.args.load_best_model_at_end = best
    with pytest.raises(ValueError, match=message):
        made.train()


def test_deepspeed_is_refused():
    arguments: Any = SimpleNamespace(deepspeed_plugin=object(), load_best_model_at_end=False)
    with pytest.raises(ValueError, match="DeepSpeed steps copies of the weights .* use DDP or FSDP 2"):
        KneeSchedule().on_train_begin(arguments, SimpleNamespace(global_step=0), None, model=kneed())  # type: ignore[arg-type]


def test_a_checkpoint_that_can_not_be_gone_on_from_is_refused(tmp_path):
    run(kneed(), tmp_path / "without", max_steps=2).train()
    with pytest.raises(ValueError, match="the checkpoint holds no state of one KneeSchedule"):
        run(kneed(), tmp_path / "again", KneeSchedule()).train(
            resume_from_checkpoint=str(tmp_path / "without" / "checkpoint-2")
        )
    run(kneed(), tmp_path / "with", KneeSchedule(), StopAt(2)).train()
    with pytest.raises(RuntimeError, match="eps is there, and the norm has no knee"):
        run(plain(), tmp_path / "again", KneeSchedule()).train(
            resume_from_checkpoint=str(tmp_path / "with" / "checkpoint-2")
        )
