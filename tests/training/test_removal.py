"""Norms taken away: what `start_removal` keeps, what `remove_norms` folds, and what both refuse."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaForCausalLM

from hf_qknorm import (
    KneeSchedule,
    Scheme,
    calibrate,
    patch_model,
    remove_norms,
    set_blend,
    set_knee,
    start_removal,
    unpatch_model,
)
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.model.in_memory import InMemoryName
from hf_qknorm.model.knees import NO_NORM, knee_of, powers_of
from hf_qknorm.ops.cpu import build
from hf_qknorm.training.removal import START, _as_llama
from qknorm_tests.kneed import REMOVED, kneed, logits, plain, qwen3
from qknorm_tests.short_runs import SaveAt, assert_equal_weights, trainer
from qknorm_tests.tables import assert_near, error, fingerprint, make_batch, randomise, sharp_model
from qknorm_tests.tiny import tiny_config

TEXT = [make_batch(kind, labels=False) for kind in ("none", "left")]


@pytest.mark.parametrize("settings", [{}, {"attention_bias": True, "tie_word_embeddings": True}])
def test_a_qwen3_is_a_llama_with_its_norms_as_a_scheme(settings, monkeypatch):
    monkeypatch.setenv(build.SWITCH, "0")  # Qwen 3's norms are in PyTorch
    model = qwen3(**settings)
    as_llama = _as_llama(model)
    assert torch.equal(logits(as_llama), logits(model))
    assert as_llama.config.scheme == Scheme(q="rms", k="rms", eps=model.config.rms_norm_eps)
    assert {x.data_ptr() for x in model.parameters()}.isdisjoint(x.data_ptr() for x in as_llama.parameters())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable:FutureWarning")
def test_a_qwen3_keeps_its_settings_and_is_measured_without_dropout():
    model = qwen3(attn_implementation="eager", attention_dropout=0.5).bfloat16()
    model.name_or_path = model.config._name_or_path = "me/qwen3"
    model.config.dtype, model.generation_config.max_length = torch.float32, 7
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].self_attn.q_norm.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    powers = powers_of(start_removal(model, TEXT))
    as_llama = start_removal(model.train(), TEXT)
    assert powers_of(as_llama) == powers
    assert as_llama.training
    assert all(layer.gradient_checkpointing for layer in as_llama.model.layers)
    assert torch.isfinite(as_llama(**TEXT[0], labels=TEXT[0]["input_ids"]).loss)
    frozen = {name for name, p in as_llama.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, p in model.named_parameters() if not p.requires_grad}
    assert len(frozen) == 2
    assert as_llama.dtype == torch.bfloat16
    assert as_llama.config._attn_implementation == "eager"
    assert as_llama.generation_config.max_length == 7
    assert as_llama.name_or_path == "me/qwen3"
    assert isinstance(as_llama.name_or_path, InMemoryName)


def test_a_head_of_zeros_stays_one():
    model: Any = patch_model(sharp_model("llama"), "qk_norm")
    layer = next(iter(patched_layers(model).values()))
    layer.k_proj.weight.data[: layer.head_dim] = 0
    before = logits(model)
    assert_near(logits(start_removal(model, TEXT)), before, 2e-4)


def test_a_start_keeps_predictions_and_makes_heads_equal():
    model = qwen3()
    before, untouched = logits(model), fingerprint(model)
    started = start_removal(model, TEXT)
    assert fingerprint(model) == untouched
    assert_near(logits(started), before, 1e-4)
    assert knee_of(started) == START
    sizes: dict[str, Any] = {}
    for name, layer in patched_layers(started).items():
        for norm_name, norm in head_norms(layer).items():
            key = f"{name}.{norm_name}"
            norm.register_forward_pre_hook(lambda _, args, key=key: sizes.setdefault(key, []).append(args[0]))
    for batch in TEXT:
        started(**batch)
    powers = {f"{name}.{norm}": power for (name, norm), power in powers_of(started).items()}
    masks = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool() for batch in TEXT]
    for key, inputs in sizes.items():
        rows = torch.cat([x[mask] for x, mask in zip(inputs, masks, strict=True)])
        heads = rows.square().mean((0, 2))
        assert heads.tolist() == pytest.approx([powers[key]] * len(heads), rel=2e-3)


@pytest.mark.parametrize("case", REMOVED)
def test_folded_norms_leave_what_constant_factors_gave(case):
    model_type, scheme, settings = REMOVED[case]
    plain_class = type(sharp_model(model_type, **settings))
    model: Any = randomise(patch_model(sharp_model(model_type, **settings), scheme)).eval()
    whole = logits(model)
    assert start_removal(model, TEXT) is model
    assert_near(logits(model), whole, 2e-4)
    set_knee(model, math.inf)
    assert knee_of(model) == NO_NORM
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
    model: Any = start_removal(qwen3(), TEXT)
    trainer(model, tmp_path, KneeSchedule(target=math.inf), SaveAt(2)).train()
    resumed: Any = start_removal(qwen3(), TEXT)
    again = trainer(resumed, tmp_path, KneeSchedule(target=math.inf))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    before = logits(resumed.eval())
    remove_norms(resumed).save_pretrained(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded) is LlamaForCausalLM
    assert not [name for name in loaded.state_dict() if "q_norm" in name or "k_norm" in name]
    assert_near(logits(loaded.eval()), before, 2e-6)


BELT = Scheme(q="rms", k="rms", softcap=5.0, sharpness=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sharp_norms_come_off_as_they_came(dtype, caplog):
    """Without training, the model is the one before the conversion up to rounding; the log has both losses."""
    model: Any = sharp_model("llama", dtype=dtype)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    calibrate(patch_model(model, BELT), TEXT, knee=3.0)
    assert remove_norms(model, TEXT, max_loss_increase=0.5) is model
    assert "norms removed: the loss goes from" in caplog.text
    assert model.config.scheme == Scheme(softcap=5.0)
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, x in before.items():
        torch.testing.assert_close(after[name], x, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_removal_above_the_limit_changes_nothing(dtype):
    model = kneed("lp", dtype=dtype)
    set_knee(model, 2.0)  # in 16 bits the gains now have a rest
    before, untouched = logits(model), fingerprint(model)
    with pytest.raises(ValueError, match=r"without its norms the model's loss goes from .* than max_loss_increase=-5"):
        remove_norms(model, TEXT, max_loss_increase=-5.0)
    assert fingerprint(model) == untouched
    assert torch.equal(logits(model), before)
    set_knee(model, 4.0)
    again = kneed("lp", dtype=dtype)
    set_knee(again, 2.0)
    set_knee(again, 4.0)
    assert torch.equal(logits(model), logits(again))


def reason(name: str, make: Any, message: str) -> Any:
    return pytest.param(make, message, id=name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        reason("plain", lambda: sharp_model("llama"), "neither patched nor a Qwen 3"),
        reason("knee", kneed, "has a knee"),
        reason("blend", lambda: (model := plain(), set_blend(model, 0.5))[0], "is in a blend"),
        reason("no gains", lambda: patch_model(sharp_model("llama"), Scheme(q="rms", gain="none")), "norms with gains"),
        reason(
            "encoder-decoder",
            lambda: patch_model(AutoModelForSeq2SeqLM.from_config(tiny_config("bart")), "qk_norm"),
            "is an encoder-decoder",
        ),
        reason("values", lambda: plain("layer"), "of queries and keys alone"),
        reason("clipped", lambda: patch_model(sharp_model("olmo"), "qk_norm"), r"clips its queries and keys to ±1 in"),
        reason("latent", lambda: patch_model(sharp_model("deepseek_v3"), "qk_norm"), "a norm of latent attention"),
        reason(
            "shared", lambda: patch_model(sharp_model("zamba"), "qk_norm"), "share weights: the norms of both can't"
        ),
        reason("capped qwen3", lambda: patch_model(qwen3(), "soft_cap"), "Qwen3ForCausalLM is changed already"),
        reason(
            "window",
            lambda: qwen3(use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "layers with sliding_attention would be lost",
        ),
    ],
)
def test_refused_starts_change_nothing(make, message):
    model = make()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message):
        start_removal(model, TEXT)
    assert fingerprint(model) == before


def test_norms_that_act_or_have_a_bias_are_not_folded():
    model = kneed()
    with pytest.raises(ValueError, match=r"the norms still act \(knee 4\).*KneeSchedule\(target=math.inf\)"):
        remove_norms(model)
    biased: Any = randomise(patch_model(sharp_model("llama"), Scheme(q="rms", k="rms", bias=True)))
    start_removal(biased, TEXT)
    set_knee(biased, math.inf)
    before = fingerprint(biased)
    with pytest.raises(ValueError, match="q_norm has a bias, and its projection has none"):
        remove_norms(biased)
    assert fingerprint(biased) == before
    offloaded: Any = kneed()
    set_knee(offloaded, math.inf)
    offloaded.model.layers[1].self_attn.k_proj.to("meta")
    with pytest.raises(ValueError, match="weight is sharded or offloaded"):
        remove_norms(offloaded)
    blended = kneed()
    set_blend(blended, 0.5)
    set_knee(blended, math.inf)
    for data in (None, TEXT):
        with pytest.raises(ValueError, match="is in a blend"):
            remove_norms(blended, data)
    values = kneed("layer")
    set_knee(values, math.inf)
    with pytest.raises(ValueError, match="of queries and keys alone"):
        remove_norms(values)
    with pytest.raises(ValueError, match="share weights"):
        remove_norms(patch_model(sharp_model("zamba"), "qk_norm"), TEXT)
    with pytest.raises(ValueError, match="is not patched"):
        remove_norms(sharp_model("llama"))


def test_wrapped_and_sharded_models_are_refused_unchanged(process_group):
    model = start_removal(plain(), TEXT)
    set_knee(model, math.inf)
    before = copy.deepcopy(model)
    for wrapped in (DistributedDataParallel(model), torch.compile(model)):
        for change in (start_removal, remove_norms):
            with pytest.raises(TypeError, match=f"got a {type(wrapped).__name__}, .* give the model inside"):
                change(wrapped, TEXT)
        with pytest.raises(ValueError, match=f"{type(wrapped).__name__} is not patched: unpatch the model inside"):
            unpatch_model(wrapped)
        assert type(model) is type(before)
        assert_equal_weights(model, before)
    sharded = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    logits(sharded)  # leaves full parameters in place of the shards
    for change in (remove_norms, unpatch_model):
        with pytest.raises(ValueError, match="sharded by FSDP2"):
            change(sharded)
        assert isinstance(sharded, FSDPModule)


def test_gains_in_float16_do_not_overflow():
    model = kneed().half()
    for norm in head_norms(next(iter(patched_layers(model).values()))).values():
        norm.weight.data.mul_(8)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="beyond its range: train in float32 or bfloat16"):
        set_knee(model, math.inf)
    assert knee_of(model) == 4.0
