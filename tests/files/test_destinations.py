"""Commands never overwrite their sources, and replace only what commands like them wrote."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hf_qknorm import convert_checkpoint, export_native, patch_model
from hf_qknorm.demo import run_demo
from hf_qknorm.files.names import KEPT_CARD
from qknorm_tests.covering import covering
from qknorm_tests.folders import contents, save_with_tokenizer
from qknorm_tests.tiny import tiny_model


def save(folder: Path, *, patched: bool = False) -> Path:
    model = tiny_model("llama", vocab_size=300)
    return save_with_tokenizer(patch_model(model, "qk_norm") if patched else model, folder)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A patched checkpoint."""
    return save(tmp_path / "run", patched=True)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """An unpatched checkpoint in a folder with nothing else."""
    return save(tmp_path / "home" / "plain")


def convert(src: Path, dst: Path | str) -> Any:
    return convert_checkpoint(src, dst, "soft_cap", overwrite=True)


def plan(src: Path, dst: Path | str) -> Any:
    return convert_checkpoint(src, dst, "soft_cap", overwrite=True, dry_run=True)


def export(src: Path, dst: Path | str) -> Any:
    return export_native(src, dst, overwrite=True)


def demo(src: Path, dst: Path | str) -> Any:
    return run_demo(checkpoint=str(src), out=str(dst))


WRITERS = {"convert": convert, "plan": plan, "export": export, "demo": demo}


PLACES = ("itself", "above", "far above", "linked above")


@pytest.mark.parametrize(
    ("writer", "place"), [*covering(["plan", "export", "demo"], PLACES, strength=1), *product(["convert"], PLACES)]
)
def test_no_source_is_replaced(writer, place, tmp_path):
    """The folder of a training has a config.json and its last model, and checkpoints below it."""
    run = save(tmp_path / "run", patched=writer == "export")
    source = save(run / "checkpoint-500", patched=writer == "export")
    destination = {"itself": source, "above": run, "far above": tmp_path}.get(place)
    if place == "linked above":
        (tmp_path / "link").symlink_to(source)
        source, destination = tmp_path / "link", run
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="is the source, or contains it"):
        WRITERS[writer](source, destination)
    assert contents(tmp_path) == before


def test_a_new_folder_in_the_source_is_accepted(run, plain):
    for source, writer in ((run, export), (plain, convert)):
        before = contents(source)
        writer(source, source / "new")
        writer(source, source / "new")  # a checkpoint, replaced like any other
        assert {name: data for name, data in contents(source).items() if not name.startswith("new/")} == before


@pytest.mark.parametrize(("writer", "name"), covering(WRITERS, ["", ".", "..", "folder/..", "sub/link/.."], strength=1))
def test_the_working_directory_is_not_replaced(writer, name, plain, run, tmp_path, monkeypatch):
    here = tmp_path / "work" / "here"
    convert(plain, here)
    (here / "folder").mkdir()
    (here.parent / "sub").mkdir()
    (here / "sub").symlink_to(here.parent / "sub")
    (here.parent / "sub" / "link").symlink_to(here / "folder")
    monkeypatch.chdir(here)
    before = contents(tmp_path)
    message = r"is empty, which would mean the working directory" if not name else "is the working directory, or holds"
    with pytest.raises((ValueError, FileExistsError), match=message):
        WRITERS[writer](run if writer == "export" else plain, name)
    assert contents(tmp_path) == before
    assert os.path.samefile(".", here)


UNKNOWN = {
    "another checkpoint": ("checkpoint-9/model.safetensors", r": checkpoint-9/\. Move them away"),
    "a calibration text": ("corpus.txt", r": corpus\.txt\."),
    "a state of training": ("optimizer.pt", r": optimizer\.pt\."),
    "pickled weights": ("pytorch_model.bin", r": pytorch_model\.bin\."),
    "a hidden file": (".env", r": \.env\."),
    "a repository": (".git/HEAD", r": \.git/\."),
    "among the templates": ("additional_chat_templates/deep/x", r": additional_chat_templates/deep\."),
}


@pytest.mark.parametrize(
    ("writer", "what"), [*covering(["plan", "export"], UNKNOWN, strength=1), *product(["convert"], UNKNOWN)]
)
def test_overwriting_deletes_only_a_checkpoint(writer, what, plain, run, tmp_path):
    file, message = UNKNOWN[what]
    out = tmp_path / "out"
    convert(plain, out)
    (out / file).parent.mkdir(parents=True, exist_ok=True)
    (out / file).write_text("precious")
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=f"out contains other files, which overwriting would delete.*{message}"):
        WRITERS[writer](run if writer == "export" else plain, out)
    assert contents(tmp_path) == before


def test_files_of_hf_qknorm_and_transformers_are_replaced(plain, tmp_path):
    """They are card and plots, report, code, and copies of the source's files."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    for name in (
        "LICENSE",
        "USE_POLICY.md",
        "chat_template.jinja",
        "README.md",
        "source.spm",
    ):
        (plain / name).write_text(name)
    (plain / "additional_chat_templates").mkdir()
    (plain / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    out = tmp_path / "out"
    options = {"data": str(tmp_path / "text.txt"), "knee": 0, "standalone": True, "overwrite": True}
    convert_checkpoint(plain, out, "qk_norm", **options)
    assert (out / KEPT_CARD).read_text() == "README.md"
    convert_checkpoint(plain, out, "qk_norm", **options)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r": notes\.txt\."):
        convert_checkpoint(plain, out, "qk_norm", **options)


def test_the_calibration_text_is_a_source(plain, tmp_path):
    out = tmp_path / "out"
    convert(plain, out)
    (out / "LICENSE.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    before = contents(out)
    for text in (out / "LICENSE.txt", str(out), str(tmp_path / "link")):
        (tmp_path / "link").is_symlink() or (tmp_path / "link").symlink_to(out / "LICENSE.txt")
        with pytest.raises(FileExistsError, match="out is the source, or contains it"):
            convert_checkpoint(plain, out, data=text, knee=0, overwrite=True)
    assert contents(out) == before


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("access", False, r"may not be written to: give another folder"),
        ("path.ismount", True, "mount point"),
    ],
)
def test_unwritable_places_are_refused_before_reading(name, answer, message, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(f"os.{name}", lambda *arguments: answer)
    with pytest.raises(OSError, match=message):
        convert_checkpoint("./no-such-source", tmp_path / "out", data=["text"])
