"""Learned sinks: their start, gpt-oss's formula, attention functions, decay, adapters, checkpoints, and refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tables import as_loaded, assert_near, make_batch, randomise, sharp_model
from tiny import tiny_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

import hf_qknorm as qk
from hf_qknorm import Scheme, patch_model, unpatch_model
from hf_qknorm.backends import functions
from hf_qknorm.backends.functions import SINK_BACKENDS
from hf_qknorm.families import FAMILIES
from hf_qknorm.model.attention import as_unpatched, patched_layers

ALONE = Scheme(sinks="learned")
NORMED = Scheme(q="rms", k="rms", sinks="learned")


def logits(model: Any, kind: str = "left") -> torch.Tensor:
    with torch.no_grad():
        return model(**make_batch(kind, labels=False)).logits


def with_sinks(scheme: Scheme, model_type: str = "llama", **options: Any) -> Any:
    return randomise(patch_model(sharp_model(model_type), scheme, **options)).eval()


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "qwen3", "deepseek_v3", "mistral"])
def test_they_start_where_they_take_next_to_nothing_and_then_take_from_every_token(model_type):
    model = tiny_model(model_type).eval()
    before = logits(model)
    patch_model(model, ALONE)
    assert_near(logits(model), before, 1e-3)  # beside logits of 0, each takes about exp(−10)
    loss = model.train()(**make_batch("plain")).loss
    loss.backward()
    for layer in patched_layers(model).values():
        assert (layer.sink.bias.grad != 0).all()
        torch.nn.init.constant_(layer.sink.bias, 2.0)
    assert (logits(model.eval()) - before).abs().max() > 1e-4
    with as_unpatched(model):
        assert_near(logits(model), before, 1e-5)
    assert_near(logits(unpatch_model(model)), before, 1e-5)


@pytest.mark.parametrize("scheme", [ALONE, NORMED])
def test_they_are_gpt_oss_sinks(scheme, monkeypatch):
    model = with_sinks(scheme, attn_implementation="eager")
    found = logits(model)

    def theirs(layer: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, s_aux: Any, **_: Any) -> Any:
        module = SimpleNamespace(sinks=s_aux, num_key_value_groups=layer.num_key_value_groups, training=False)
        return eager_attention_forward(module, q, k, v, mask, scaling)

    monkeypatch.setattr(functions, "attention_function", lambda *_: theirs)
    real = make_batch("left")["attention_mask"].bool()
    assert_near(found[real], logits(model)[real], 1e-5)
    for layer in patched_layers(model).values():
        torch.nn.init.constant_(layer.sink.bias, -30.0)
    assert (logits(model) - found).abs().max() > 1e-3


@pytest.mark.parametrize("scheme", [ALONE, Scheme(q="rms", softcap=5.0, sinks="learned")])
@pytest.mark.parametrize("backend", ["hf_qknorm", "hf_qknorm_tiled", "eager"])
def test_attention_functions_agree(backend, scheme):
    model = with_sinks(scheme, attn_implementation="hf_qknorm_eager")
    real = make_batch("left")["attention_mask"].bool()
    expected = logits(model)[real]
    model.set_attn_implementation(backend)
    assert_near(logits(model)[real], expected, 1e-5)


def test_generation_from_a_cache_gives_the_tokens_of_full_passes():
    model = with_sinks(ALONE)
    ids = make_batch("plain")["input_ids"][:1, :5]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(ids, **options)
    assert torch.equal(found, model.generate(ids, cache_implementation="static", **options))
    for length in range(5, 11):
        with torch.no_grad():
            assert model(input_ids=found[:, :length]).logits[0, -1].argmax() == found[0, length]


def test_functions_that_drop_sinks_are_refused(tmp_path):
    model = sharp_model("llama")
    for name in ("sdpa", "flash_attention_2", "flash_attention_3"):
        with pytest.raises(ValueError, match=f"'{name}' would drop the learned sinks") as error:
            patch_model(model, ALONE, attn_implementation=name)
        assert all(able in str(error.value) for able in SINK_BACKENDS)
    assert patch_model(model, ALONE).config._attn_implementation == "hf_qknorm"
    with pytest.raises(ValueError, match="would drop the learned sinks"):
        model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "hf_qknorm"
    with pytest.raises(ValueError, match="would drop the learned sinks"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")


def test_models_with_sinks_of_their_own_keep_them():
    names = {name for name, family in FAMILIES.items() if family.style.has_sinks}
    assert {"gpt_oss", "granite_swa", "mimo_v2_flash", "flint"} <= names
    with pytest.raises(ValueError, match="gpt_oss has attention sinks of its own, and keeps them"):
        patch_model(sharp_model("gpt_oss"), ALONE)


def test_weight_decay_leaves_them_out(tmp_path):
    model = patch_model(sharp_model("llama"), NORMED)
    trainer = Trainer(model, TrainingArguments(tmp_path, report_to=[], use_cpu=True))
    decayed = set(trainer.get_decay_parameter_names(model))
    own = {f"{name}.sink.bias" for name in patched_layers(model)}
    assert own <= dict(model.named_parameters()).keys() - decayed


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name
def test_an_adapter_trains_them():
    model = with_sinks(ALONE)
    before = logits(model)
    assert qk.peft_modules_to_save(model) == ["sink"]
    peft = get_peft_model(model, LoraConfig(modules_to_save=["sink"], target_modules=["v_proj"]))
    layer = next(iter(patched_layers(model).values()))
    layer.head_bias("sink").bias.data.fill_(5.0)
    assert (logits(peft) - before).abs().max() > 1e-3
    with peft.disable_adapter():
        assert torch.equal(logits(peft), before)


def test_checkpoints_keep_them(tmp_path):
    model = as_loaded(with_sinks(NORMED))
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(ValueError, match="in the weights but not in the scheme, first .*sink.bias"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved", qk_norm=Scheme(q="rms", k="rms"))
    base = sharp_model("llama").eval()
    base.save_pretrained(tmp_path / "base")
    qk.convert_checkpoint(tmp_path / "base", tmp_path / "converted", scheme=ALONE)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    patched = patch_model(base, ALONE)
    assert torch.equal(logits(converted), logits(patched))
    with pytest.raises(ValueError, match="the learned sinks would be lost"):
        qk.export_native(tmp_path / "converted", tmp_path / "native")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sinks": True}, r'Scheme\(sinks=True\) .*"learned" or None'),
        ({"sinks": "learned", "length_scale": 8}, r"Scheme\(sinks='learned'\) .*None with a length scale"),
    ],
)
def test_impossible_schemes(fields, message):
    with pytest.raises(ValueError, match=message):
        Scheme(**fields)
