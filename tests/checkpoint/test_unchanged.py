"""A source that changes while it is read is refused, and nothing is written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_qknorm import convert_checkpoint, export_native, patch_model
from hf_qknorm.checkpoint import safetensors_files
from hf_qknorm.checkpoint.source import open_source
from hf_qknorm.convert import checkpoint
from hf_qknorm.hub import push
from qknorm_tests.folders import contents, save, save_with_tokenizer
from qknorm_tests.tables import as_loaded, sharp_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Save a patched checkpoint with a tokenizer, and another of the same layout beside it."""
    for name, scheme in (("source", "none"), ("other", "soft_cap")):
        save_with_tokenizer(as_loaded(patch_model(sharp_model("llama", vocab_size=300), scheme)), tmp_path / name)
    return tmp_path / "source"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save_with_tokenizer(sharp_model("llama", vocab_size=300), tmp_path / "source")


def rewritten(name: str) -> Callable[[Path], None]:
    """Return a function that writes the same bytes again."""

    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(data)

    return change


def layout(folder: Path) -> None:
    """Save tensors in another order: the offsets of the old header are wrong then."""
    model = sharp_model("llama", vocab_size=300, intermediate_size=80)
    shutil.rmtree(folder)
    save(model, folder)


def appeared(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights": (rewritten(WEIGHTS), WEIGHTS),
    "config": (rewritten("config.json"), "config.json"),
    "tokenizer": (rewritten("tokenizer.json"), "tokenizer.json"),
    "config in place": (lambda f: os.utime(f / "config.json", ns=(1, 1)), "config.json"),
    "another checkpoint": (layout, r"\w+"),
    "an adapter": (appeared, "adapter_config.json"),
    "a single file gone": (lambda f: (f / WEIGHTS).unlink(), WEIGHTS),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_conversion_of_a_source_that_changes(change, plain, tmp_path, monkeypatch):
    act, name = CHANGES[change]
    rewrite = safetensors_files.Weights.rewrite

    def late(weights: safetensors_files.Weights, *arguments: object) -> None:
        if change == "a single file gone":  # before it is read
            act(plain)
        rewrite(weights, *arguments)
        if change != "a single file gone":
            act(plain)

    monkeypatch.setattr(safetensors_files.Weights, "rewrite", late)
    with pytest.raises(ValueError, match=rf"{name}.* changed while it was read.*: nothing was written"):
        convert_checkpoint(plain, tmp_path / "out", "qk_norm")
    assert os.listdir(tmp_path) == ["source"]


def test_a_change_before_anything_is_written(plain, tmp_path, monkeypatch):
    """The layout changes after the headers are read and before the tensors are."""
    planned = checkpoint.make_plan

    def late(*arguments: object) -> object:
        plan = planned(*arguments)
        layout(plain)
        return plan

    monkeypatch.setattr(checkpoint, "make_plan", late)
    with pytest.raises(ValueError, match="changed while it was read"):
        convert_checkpoint(plain, tmp_path / "out", "qk_norm")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("change", ["weights", "config", "tokenizer"])
def test_an_export_of_a_source_that_changes(change, source, tmp_path, monkeypatch):
    act, name = CHANGES[change]
    rewrite = safetensors_files.Weights.rewrite
    monkeypatch.setattr(safetensors_files.Weights, "rewrite", lambda *arguments: (rewrite(*arguments), act(source)))
    with pytest.raises(ValueError, match=rf"{name} changed while it was read"):
        export_native(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["weights", "config"])
def test_a_push_of_a_source_that_changes(change, source):
    act, name = CHANGES[change]
    calls: list[str] = []

    class Hub:
        def model_info(self, *arguments: object, **options: object) -> object:
            return type("Info", (), {"siblings": []})()

        def preupload_lfs_files(self, *arguments: object, **options: object) -> None:
            act(source)

        def create_commit(self, *arguments: object, **options: object) -> None:
            calls.append("commit")

    with open_source(source) as opened, pytest.raises(ValueError, match=rf"{name} changed while it was read"):
        push._upload(Hub(), "me/tiny", opened, {WEIGHTS: source / WEIGHTS}, commit_message="", revision=None)
    assert not calls


def test_unread_files_may_change(plain, tmp_path, monkeypatch):
    """A training writes its state and logs beside the checkpoint."""
    (plain / "trainer_state.json").write_text("{}")
    rewrite = safetensors_files.Weights.rewrite

    def late(weights: safetensors_files.Weights, *arguments: object) -> None:
        rewrite(weights, *arguments)
        (plain / "trainer_state.json").write_text(json.dumps({"step": 2}))
        (plain / "train.log").write_text("step 2")

    monkeypatch.setattr(safetensors_files.Weights, "rewrite", late)
    convert_checkpoint(plain, tmp_path / "out", "qk_norm")
    assert "config.json" in contents(tmp_path / "out")
