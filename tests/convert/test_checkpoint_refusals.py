"""Sources that can't be converted are refused by file, before anything is written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BartForConditionalGeneration, BertForMaskedLM

from hf_qknorm import SCHEMES, convert_checkpoint, plan_conversion
from hf_qknorm.checkpoint.safetensors_files import INDEX
from hf_qknorm.convert import checkpoint
from qknorm_tests.folders import contents, loaded, save, save_with_tokenizer
from qknorm_tests.tables import trained_like
from qknorm_tests.tiny import tiny_config


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _drop_entry(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))


def _shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


DAMAGE = {
    "truncated shard": (lambda f: _truncate(_shard(f)), r"model-00002-of-\d+.safetensors is truncated or corrupted"),
    "corrupted shard": (lambda f: _shard(f).write_bytes(b"\xff" * 4096), r"model-00002.* is truncated or corrupted"),
    "missing shard": (lambda f: _shard(f).unlink(), r"model-00002-of-\d+.safetensors is missing"),
    "missing index entry": (_drop_entry, r"index.json has no entry for model.norm.weight"),
    "corrupted index": (lambda f: _truncate(f / INDEX), r"index.json is no JSON"),
    "index without map": (lambda f: (f / INDEX).write_text("{}"), r'index.json has no "weight_map"'),
    "index with a path": (
        lambda f: _edit(f / INDEX, weight_map={"x": "../../secret.safetensors"}),
        r"said to be in '../../secret.safetensors': expected a .safetensors file of this folder",
    ),
    "no weights": (lambda f: [p.unlink() for p in [*f.glob("model*"), f / "pytorch_model.bin"]], r"holds no weights"),
    "corrupted tokenizer": (lambda f: _truncate(f / "tokenizer.json"), r"tokenizer.json is no JSON"),
    "strange tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        r"tokenizer.json: the tokenizer can't be read",
    ),
    "quantised": (
        lambda f: _edit(f / "config.json", quantization_config={}),
        r"config.json: this checkpoint is quantised",
    ),
    "unsupported": (lambda f: _edit(f / "config.json", model_type="mamba"), r"model_type 'mamba' is not supported"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_sources_are_refused_by_file(damage, llama, tmp_path):
    change, message = DAMAGE[damage]
    change(llama)
    before = contents(llama)
    with pytest.raises((ValueError, OSError), match=message):
        convert_checkpoint(llama, tmp_path / "out")
    with pytest.raises((ValueError, OSError), match=message):
        plan_conversion(llama, tmp_path / "out")
    assert contents(llama) == before
    assert sorted(os.listdir(tmp_path)) == ["source"]


def test_other_refusals(llama, tmp_path):
    out = tmp_path / "out"
    convert_checkpoint(llama, out, "qk_norm")
    before = contents(out)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").write_text("")
    biased = save(trained_like("gpt2"), tmp_path / "biased")
    for arguments, message in (
        ((llama, out), r"out exists and is not empty: .*--overwrite"),
        ((llama, llama, "qk_norm", {"overwrite": True}), "is the source, or contains it"),
        ((llama, tmp_path, "qk_norm", {"overwrite": True}), "is the source, or contains it"),
        ((llama, tmp_path / "photos", "qk_norm", {"overwrite": True}), "holds no config.json with 'model_type'"),
        ((llama, llama / "LICENSE", "qk_norm", {"overwrite": True}), "LICENSE is a file"),
        ((out, tmp_path / "twice"), r"is converted already \(q=rms, k=rms\)"),
        ((tmp_path / "adapter", tmp_path / "new"), "holds an adapter: merge it"),
        ((tmp_path / "nowhere", tmp_path / "new"), "nowhere is no folder"),
        ((llama, tmp_path / "new", "qk_nrom"), "did you mean 'qk_norm'"),
        ((biased, tmp_path / "new", "qkv_norm"), r"can't fold .*bias exactly.* Pass calibration="),
        ((llama, tmp_path / "new", "qk_norm", {"method": "guess", "calibration": ["text"]}), "unknown method 'guess'"),
        (
            (llama, tmp_path / "new", "qk_norm", {"max_loss_increase": 0.1}),
            "max_loss_increase is for a calibration, on text: pass calibration=",
        ),
    ):
        *positional, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
        with pytest.raises((ValueError, OSError), match=message):
            convert_checkpoint(*positional, **options)
    assert contents(out) == before
    assert sorted(os.listdir(tmp_path)) == ["adapter", "biased", "out", "photos", "source"]
    convert_checkpoint(llama, out, "soft_cap", overwrite=True)
    assert loaded(out).config.scheme == SCHEMES["soft_cap"]


@pytest.mark.parametrize(
    ("model_type", "model_class", "message"),
    [
        (
            "bart",
            BartForConditionalGeneration,
            "bart has bidirectional attention and predicts no next token, which is measured here: patch it with",
        ),
        (
            "bert",
            BertForMaskedLM,
            "BertForMaskedLM has bidirectional attention and predicts masked tokens: give batches with",
        ),
    ],
)
def test_models_that_a_text_can_not_calibrate_are_refused_before_their_weights_are_read(
    model_type, model_class, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint, "place_weights", None)
    model = model_class(tiny_config(model_type, vocab_size=300, is_decoder=False))
    source = save_with_tokenizer(model, tmp_path / "source")
    (tmp_path / "text.txt").write_text("to be or not to be " * 20)
    for convert in (plan_conversion, convert_checkpoint):
        with pytest.raises(ValueError, match=message):
            convert(source, tmp_path / "out", "qk_norm", calibration=tmp_path / "text.txt")


def test_a_masked_model_is_calibrated_on_batches_with_labels(tmp_path):
    source = save(BertForMaskedLM(tiny_config("bert", vocab_size=64, is_decoder=False)), tmp_path / "source")
    tokens = torch.randint(3, 64, (4, 20))
    labels = tokens.where(torch.rand(tokens.shape) < 0.5, -100)
    report = convert_checkpoint(
        source, tmp_path / "out", "qk_norm", calibration=[{"input_ids": tokens, "labels": labels}]
    )
    assert report is not None
    assert report.tokens == 80


def test_a_plan_refuses_an_exportable_conversion_that_has_no_native_model(llama, tmp_path):
    """The default scheme has a cap."""
    with pytest.raises(ValueError, match=r"config.json: norms .* or the cap of 50 would be lost"):
        plan_conversion(llama, tmp_path / "out", calibration="text", exportable=True)


def test_a_plan_tries_the_text_and_leaves_an_iterator(llama, tmp_path):
    texts = iter(["to be or not to be " * 20])
    plan_conversion(llama, tmp_path / "out", calibration=texts)
    assert list(texts)
    (tmp_path / "text.txt").write_text("to be")
    with pytest.raises(ValueError, match="the text gives 4 tokens to predict, expected at least 16"):
        plan_conversion(llama, tmp_path / "out", calibration=str(tmp_path / "text.txt"))
    (tmp_path / "text.txt").write_text("to be or not to be " * 2)
    plan_conversion(llama, tmp_path / "out", calibration=str(tmp_path / "text.txt"), length=2)


def test_gains_that_are_not_finite_are_not_written(llama, tmp_path, monkeypatch):
    """A calibration of a model that overflows gives NaN."""
    calibrated = checkpoint._calibrate

    def broken(*arguments: Any) -> Any:
        report, values, *others = calibrated(*arguments)
        return report, values | {name: value * torch.nan for name, value in list(values.items())[:1]}, *others

    monkeypatch.setattr(checkpoint, "_calibrate", broken)
    with pytest.raises(ValueError, match=r"self_attn.q_norm.weight would hold NaN or infinity in float32: nothing was"):
        convert_checkpoint(llama, tmp_path / "out", calibration=["to be or not to be " * 20], method="ones")
    assert sorted(os.listdir(tmp_path)) == ["source"]


def test_a_full_disk(llama, tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: free)
    with pytest.raises(OSError, match=r"out needs .* MB, and .* has 0.0 MB free: nothing was written"):
        convert_checkpoint(llama, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["source"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, the device that is always full")
def test_a_disk_that_fills_up_while_writing(llama, tmp_path, monkeypatch):
    opened = Path.open

    def full(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        return opened(Path("/dev/full") if "w" in mode and "00002" in path.name else path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match=r"No space left on device: .*model-00002-of-\d+.safetensors"):
        convert_checkpoint(llama, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["source"]
