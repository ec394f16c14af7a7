"""Weights that do not match the config are refused by file and tensor, before anything is written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_qknorm import convert_checkpoint, patch_model, plan_conversion, push_to_hub
from hf_qknorm.checkpoint.complete import check_complete
from hf_qknorm.checkpoint.source import open_source
from qknorm_tests.folders import configure, edit, loaded, logits, save
from qknorm_tests.slow import slow_but
from qknorm_tests.tables import make_batch, sharp_model, swept
from qknorm_tests.tiny import tiny_model

FILE = "model.safetensors"
ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
FEW = ("arcee", "gpt_neox", "jamba", "zamba")  # transformers renames, joins and shares the tensors of the last three


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_type" in metafunc.fixturenames:
        metafunc.parametrize("model_type", slow_but(FEW, swept(metafunc.config)))


def like(tensors: dict[str, Tensor], name: str, **options: Any) -> Tensor:
    return torch.ones_like(tensors[name], **options)


# How a checkpoint of a Llama is damaged, and the message of the refusal.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no MLP": (
        lambda f: edit(f, lambda t: [t.pop(name) for name in list(t) if ".mlp." in name]),
        rf"{FILE}: no entry for model.layers.0.mlp.gate_proj.weight \[96, 64\] and 5 more, which .*config.json asks",
    ),
    "another class": (
        lambda f: configure(f, architectures=["LlamaForSequenceClassification"]),
        r"no entry for score.weight \[2, 64\].*LlamaForSequenceClassification",
    ),
    "too many layers": (
        lambda f: configure(f, num_hidden_layers=5),
        r"no entry for model.layers.2.self_attn.q_proj.weight .*config.json asks for \(num_hidden_layers=5",
    ),
    "another shape": (
        lambda f: configure(f, intermediate_size=80),
        rf"{FILE}: model.layers.0.mlp.gate_proj.weight has shape \[96, 64\], expected \[80, 64\], as .*config.json",
    ),
    "empty": (
        lambda f: edit(f, lambda t: t.update({"model.norm.weight": torch.ones(0)})),
        rf"{FILE}: model.norm.weight has shape \[0\], expected \[64\]",
    ),
    "norms of a patched model": (
        lambda f: edit(f, lambda t: t.update({f"{ATTENTION}.q_norm.weight": torch.ones(16)})),
        rf"{FILE}: {ATTENTION}.q_norm.weight is the weight of a norm that a LlamaForCausalLM does not have",
    ),
    "twice": (
        lambda f: edit(f, lambda t: t.update({"layers.0.mlp.up_proj.weight": torch.ones(96, 64)})),
        r"layers.0.mlp.up_proj.weight and .*layers.0.mlp.up_proj.weight are both read as model.layers.0.mlp.up_proj",
    ),
    **{
        f"{part} in {dtype}": (
            lambda f, name=name, dtype=dtype: edit(f, lambda t: t.update({name: like(t, name, dtype=dtype)})),
            rf"{FILE}: {name} is stored as {stored}, expected F16, BF16, F32 or F64.*: dequantise it first",
        )
        for part, name, dtype, stored in (
            ("q_proj", f"{ATTENTION}.q_proj.weight", torch.int8, "I8"),
            ("q_proj", f"{ATTENTION}.q_proj.weight", torch.float8_e4m3fn, "F8_E4M3"),
            ("up_proj", f"{MLP}.up_proj.weight", torch.int64, "I64"),
        )
    },
    "config that fits no model": (lambda f: configure(f, num_attention_heads=0), r"config.json"),
    "class of another model": (
        lambda f: configure(f, architectures=["GPT2LMHeadModel"]),
        r"config.json: no GPT2LMHeadModel can be built from it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_incomplete_sources_are_refused(damage, tmp_path):
    change, message = DAMAGE[damage]
    source = save(tiny_model("llama"), tmp_path / "source")
    change(source)
    for convert in (plan_conversion, convert_checkpoint):
        with pytest.raises(ValueError, match=message) as error:
            convert(source, tmp_path / "out", "qk_norm")
        assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("damage", ["too many layers", "q_proj in torch.int8"])
def test_incomplete_checkpoints_are_not_pushed(damage, tmp_path, monkeypatch):
    folder = save(patch_model(tiny_model("llama"), "qk_norm"), tmp_path / "out")
    DAMAGE[damage][0](folder)
    monkeypatch.setattr("hf_qknorm.hub.push.check_repository", lambda *arguments, **options: pytest.fail("asked"))
    with pytest.raises(ValueError, match=DAMAGE[damage][1]):
        push_to_hub(folder, "me/tiny")


JOINED = {
    "an expert": (("experts.1.w1", "experts.1.w2", "experts.1.w3"), r"joined from \d tensors, .* has shape \[1, "),
    "half an expert": (("experts.1.w1",), r"joined as .*gate_up_proj. Some of these are missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", JOINED)
def test_a_missing_part_of_a_joined_tensor_is_found(case, tmp_path):
    parts, message = JOINED[case]
    source = save(tiny_model("mixtral"), tmp_path / "source")
    gone = [f"model.layers.1.block_sparse_moe.{part}.weight" for part in parts]
    edit(source, lambda t: [t.pop(name) for name in gone])
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out")


def test_the_class_in_the_config_decides_on_the_tensors(tmp_path):
    """Weights of a language model under its base model's name are complete; the unread head is copied."""
    model = sharp_model("llama")
    source = save(model, tmp_path / "source")
    configure(source, architectures=["LlamaModel"])
    plan = plan_conversion(source, tmp_path / "out", "qk_norm")
    assert plan.unused == ("lm_head.weight",)
    assert "1 tensors, first lm_head.weight: copied, and not read by the model" in str(plan)
    convert_checkpoint(source, tmp_path / "out", "qk_norm")
    assert "lm_head.weight" in load_file(tmp_path / "out" / FILE)
    assert type(transformers.AutoModel.from_pretrained(tmp_path / "out")).__name__ == "QKNormLlamaModel"


def test_a_tied_head_may_be_stored_or_not(tmp_path):
    model = sharp_model("llama", tie_word_embeddings=True)
    source = save(model, tmp_path / "source")
    assert "lm_head.weight" not in load_file(source / FILE)
    convert_checkpoint(source, tmp_path / "absent", "qk_norm")
    edit(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    convert_checkpoint(source, tmp_path / "there", "qk_norm")
    expected = logits(patch_model(model, "qk_norm", attn_implementation="hf_qknorm"))
    for name in ("absent", "there"):
        assert torch.equal(logits(loaded(tmp_path / name)), expected)


def test_legacy_names_are_the_same_tensors(tmp_path):
    model = sharp_model("bert")
    source = save(model, tmp_path / "source")

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(name)

    edit(source, rename)
    convert_checkpoint(source, tmp_path / "out", "qk_norm")
    assert torch.equal(
        logits(loaded(tmp_path / "out")), logits(patch_model(model, "qk_norm", attn_implementation="hf_qknorm"))
    )
    edit(source, lambda t: t.pop("bert.encoder.layer.0.output.LayerNorm.gamma"))
    with pytest.raises(ValueError, match=r"no entry for bert.encoder.layer.0.output.LayerNorm.weight"):
        convert_checkpoint(source, tmp_path / "again", "qk_norm")


def test_a_cap_is_put_on_each_family(model_type, tmp_path):
    """Also if transformers renames, joins or shares the layers' tensors, as a cap has no tensors."""
    model = sharp_model(model_type)
    # Without the stand-alone code, which takes a second of each family; tests/standalone has it.
    convert_checkpoint(save(model, tmp_path / "source"), tmp_path / "out", "soft_cap", standalone=False)
    tokens = make_batch("plain")["input_ids"]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
        assert torch.equal(found, patch_model(model, "soft_cap").eval()(tokens).logits)


def test_each_tensor_of_each_family_is_required(model_type, tmp_path):
    """No saved tensor may be missing, of another shape, or of integers."""
    model = tiny_model(model_type)
    may_be_absent = re.compile("|".join(model._keys_to_ignore_on_load_missing or ["$."]))
    with open_source(save(model, tmp_path / "source")) as source:
        stored = source.weights.stored
        assert not source.check_complete()
        for name in sorted(stored)[:: max(1, len(stored) // 2)]:
            wide = replace(stored[name], shape=(*stored[name].shape[:-1], 1000))
            integer = replace(stored[name], dtype="I8")
            for tensors in (
                {**stored, name: wide},
                {**stored, name: integer},
                {k: stored[k] for k in stored.keys() - {name}},
            ):
                if name not in tensors and may_be_absent.search(name):
                    continue
                with pytest.raises(ValueError, match=r"model.safetensors: .*(expected|Is the download complete)"):
                    check_complete(source.model_class, source.config, tensors, source.folder)


def test_a_missing_head_is_not_initialised(tmp_path):
    """A fine-tuning may start from a random head, a conversion may not: load, train and save the model first."""
    source = save(sharp_model("llama"), tmp_path / "source")
    configure(source, architectures=["LlamaForSequenceClassification"])
    AutoModelForSequenceClassification.from_pretrained(source).save_pretrained(tmp_path / "whole")
    convert_checkpoint(tmp_path / "whole", tmp_path / "out", "qk_norm")
    with pytest.raises(ValueError, match=r'correct the config, or name the class .* under "architectures"'):
        convert_checkpoint(source, tmp_path / "again", "qk_norm")


def test_old_buffers_are_ignored(tmp_path):
    source = save(sharp_model("gpt2"), tmp_path / "source")
    edit(source, lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)}))
    convert_checkpoint(source, tmp_path / "out", "qk_norm")
