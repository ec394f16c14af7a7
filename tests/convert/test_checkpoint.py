"""Converting a checkpoint gives the same model as patching it in memory."""

from __future__ import annotations

import json
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import FAMILIES, SCHEMES, Scheme, calibrate, convert_checkpoint, patch_model, plan_conversion
from hf_qknorm.checkpoint import source
from hf_qknorm.checkpoint.safetensors_files import INDEX
from hf_qknorm.demo.training import byte_tokenizer
from hf_qknorm.hub.card import write_card
from hf_qknorm.reports.report import Calibration
from qknorm_tests.folders import contents, loaded, logits, save, save_with_tokenizer
from qknorm_tests.kneed import knees_of
from qknorm_tests.tables import PAIRS, make_batch, sharp_model, trained_like

STREAMED = [(t, name) for t, name in PAIRS if SCHEMES[name].pre_norm or FAMILIES[t].norm == "rms"]
CASES = [(t, name, bool(number % 2)) for number, (t, name) in enumerate(STREAMED)]
TEXTS = ["to be, or not to be: that is the question. " * 12]


@pytest.mark.parametrize(("model_type", "preset", "sharded"), CASES)
def test_a_conversion_equals_patching(model_type, preset, sharded, tmp_path):
    model = trained_like(model_type, biases=False)
    options = {"max_shard_size": "60KB"} if sharded else {}
    folder = save(model, tmp_path / "source", **options)
    before = contents(folder)
    assert convert_checkpoint(folder, tmp_path / "out", preset) is None
    converted = loaded(tmp_path / "out")
    assert torch.equal(logits(converted), logits(patch_model(model, preset, attn_implementation="hf_qknorm")))
    assert converted.config.scheme == model.config.scheme
    assert converted.config.architectures == [type(model).__name__]
    assert contents(folder) == before
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(list(folder.glob("*.safetensors")))
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForSequenceClassification"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox"])
def test_other_heads_and_bare_models(auto, model_type, tmp_path):
    model = getattr(transformers, auto).from_config(sharp_model(model_type).config).eval()
    convert_checkpoint(save(model, tmp_path / "source"), tmp_path / "out", "qk_norm")
    converted = getattr(transformers, auto).from_pretrained(tmp_path / "out")
    batch = make_batch("left", labels=False)
    assert torch.equal(converted(**batch)[0], patch_model(model, "qk_norm")(**batch)[0])


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_keys_with_and_without_their_prefix(prefix, tmp_path):
    """The Hub's GPT-2 is stored as its base model, under a config that names the language model."""
    from safetensors.torch import save_file

    model = sharp_model("gpt2")
    folder = save(model, tmp_path / "source")
    state = load_file(folder / "model.safetensors")
    renamed = {f"{prefix}{name.removeprefix('transformer.')}": value for name, value in state.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    convert_checkpoint(folder, tmp_path / "out", "qk_norm_cap")
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(patch_model(model, "qk_norm_cap")))


def test_dtypes_stay_and_untouched_tensors_keep_their_bytes(tmp_path):
    folder = save(sharp_model("llama").bfloat16(), tmp_path / "source")
    convert_checkpoint(folder, tmp_path / "out", Scheme(q="rms", k="rms", gain="per_head", bias=True))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert {value.dtype for value in after.values()} == {torch.bfloat16}
    assert len(after) == len(before) + 2 * 6
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert loaded(tmp_path / "out").dtype == torch.bfloat16


def test_which_files_are_copied(llama, tmp_path):
    plan = plan_conversion(llama, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "pytorch_model.bin" in plan.left
    assert "adds        76 parameters: 8 tensors, first model.layers.0.self_attn.q_norm.weight" in str(plan)
    convert_checkpoint(llama, tmp_path / "out")
    there = set(contents(tmp_path / "out"))
    assert {"LICENSE", "README.md", "chat_template.jinja", "additional_chat_templates/tool.jinja", INDEX} <= there
    assert not there & {"pytorch_model.bin", ".gitattributes", "training_args.bin"}
    assert set(plan.files) < there
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("to be")["input_ids"]) == "to be"


@pytest.mark.costly
@pytest.mark.parametrize(
    ("model_type", "preset", "method"),
    [
        ("llama", "qk_norm_cap", "moments"),
        ("gpt2", "qk_norm_cap", "ones"),
        ("gpt2", "qkv_norm", "moments"),
    ],
)
def test_a_calibrated_conversion(model_type, preset, method, tmp_path):
    model = trained_like(model_type, vocab_size=300)
    folder = save_with_tokenizer(model, tmp_path / "source", max_shard_size="60KB")
    plan = plan_conversion(folder, tmp_path / "out", preset, calibration=TEXTS, method=method)
    report = convert_checkpoint(folder, tmp_path / "out", preset, calibration=TEXTS, method=method)
    expected = patch_model(AutoModelForCausalLM.from_pretrained(folder), preset)
    again = calibrate(expected, TEXTS, method=method, tokenizer=byte_tokenizer())
    assert report.loss == pytest.approx(again.loss, abs=1e-5)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    state = expected.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in converted.state_dict().items())
    assert torch.equal(logits(converted), logits(expected))
    stored = {name: converted.get_parameter(name) for name in plan.changed}
    base = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    moved = {name for name, value in base.items() if name in state and not torch.equal(value, state[name])}
    assert moved <= set(stored)
    assert bool(stored) == (preset == "qkv_norm")
    saved = json.loads((tmp_path / "out" / "qk_norm_report.json").read_text())
    assert Calibration.from_dict(saved).loss == report.loss


@pytest.mark.parametrize(
    ("model_type", "options"), [("llama", {"knee": 2}), ("gpt2", {"method": "ones", "knee": 1}), ("llama", {})], ids=str
)
def test_a_knee_is_written(model_type, options, tmp_path):
    """The config has the powers, and ε is in float32, whatever the model's dtype."""
    model = trained_like(model_type, vocab_size=300).bfloat16()
    folder = save_with_tokenizer(model, tmp_path / "source", max_shard_size="60KB")
    report = convert_checkpoint(folder, tmp_path / "out", "qk_norm", calibration=TEXTS, **options)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert converted.config.scheme == report.scheme
    assert report.knee == pytest.approx(options.get("knee", report.knee), rel=0.1)
    assert len(knees_of(converted)) == 4
    again = patch_model(AutoModelForCausalLM.from_pretrained(folder), "qk_norm")
    calibrate(again, TEXTS, tokenizer=byte_tokenizer(), **options)
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in converted.state_dict().items())


def test_hub_names(llama, tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        source, "snapshot_download", lambda name, **options: asked.update({name: options}) or str(llama)
    )
    convert_checkpoint("owner/name", tmp_path / "out")
    assert "*.bin" in asked["owner/name"]["ignore_patterns"]
    assert "*.safetensors" not in asked["owner/name"]["ignore_patterns"]
    plan_conversion("owner/name", tmp_path / "new", allow_pickle=True)
    assert "*.bin" not in asked["owner/name"]["ignore_patterns"]


def test_a_card_names_the_model_that_was_converted(llama, tmp_path, monkeypatch):
    """Without a report too: the source's own card names the source's base model."""
    (llama / "README.md").write_text("---\nbase_model: owner/ancestor\n---\n# Theirs\n")
    monkeypatch.setattr(source, "snapshot_download", lambda name, **options: str(llama))
    convert_checkpoint("owner/name", tmp_path / "out", "soft_cap")
    write_card(tmp_path / "out", repo_id="me/converted")  # as before a push
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: owner/name\n" in card
    assert "[owner/name](https://huggingface.co/owner/name) with a logit cap" in card
    assert "ancestor" not in card


def test_pickles_need_permission(tmp_path):
    model = sharp_model("llama")
    folder = save(model, tmp_path / "source")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model.bin: only pickled weights .*--allow-pickle"):
        convert_checkpoint(folder, tmp_path / "out")
    convert_checkpoint(folder, tmp_path / "out", allow_pickle=True)
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(patch_model(model)))
    assert not list((tmp_path / "out").glob("*.bin"))
