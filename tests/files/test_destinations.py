"""Commands never overwrite their sources, and replace only what commands like them wrote."""

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hf_qknorm import LogitMonitor, cli, convert_checkpoint, export_native, patch_model
from hf_qknorm.convert.card import write_card
from hf_qknorm.demo import run_demo
from hf_qknorm.files.names import KEPT_CARD
from qknorm_tests.covering import covering
from qknorm_tests.folders import contents, save_with_tokenizer
from qknorm_tests.tiny import tiny_model

TEXT = "the quick brown fox jumps over the lazy dog. " * 40


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


WRITERS: dict[str, Any] = {
    "convert": lambda src, dst: convert_checkpoint(src, dst, "soft_cap", overwrite=True),
    "plan": lambda src, dst: convert_checkpoint(src, dst, "soft_cap", overwrite=True, dry_run=True),
    "export": lambda src, dst: export_native(src, dst, overwrite=True),
    "demo": lambda src, dst: run_demo(checkpoint=str(src), out=str(dst)),
}
convert = WRITERS["convert"]
PLACES = ("itself", "above", "far above", "linked above")


@pytest.mark.parametrize(
    ("writer", "place"), [*covering(["plan", "export"], PLACES, strength=1), *product(["convert"], PLACES)]
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
    for source, writer in ((run, "export"), (plain, "convert")):
        before = contents(source)
        for _ in range(2):  # a checkpoint is replaced like any other
            WRITERS[writer](source, source / "new")
        assert {name: data for name, data in contents(source).items() if not name.startswith("new/")} == before


@pytest.mark.parametrize(
    ("writer", "name"),
    covering(["convert", "plan", "export"], ["", ".", "..", "folder/..", "sub/link/..", "no/../../here"], strength=1),
)
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
    "among the templates": ("additional_chat_templates/deep/x", r": additional_chat_templates/deep/\."),
}


@pytest.mark.parametrize(
    ("writer", "what"), [*covering(["plan", "export", "demo"], UNKNOWN, strength=1), *product(["convert"], UNKNOWN)]
)
def test_overwriting_deletes_only_a_checkpoint(writer, what, plain, run, tmp_path):
    file, message = UNKNOWN[what]
    out = tmp_path / "out"
    held = out / "model" if writer == "demo" else out
    convert(plain, held)
    (held / file).parent.mkdir(parents=True, exist_ok=True)
    (held / file).write_text("precious")
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=f"contains other files, which overwriting would delete.*{message}"):
        WRITERS[writer](run if writer == "export" else plain, out)
    (held / "config.json").unlink()
    with pytest.raises(FileExistsError, match=r"holds no config.json, so it may not be overwritten"):
        WRITERS[writer](run if writer == "export" else plain, out)
    assert contents(tmp_path).keys() == before.keys() - {str((held / "config.json").relative_to(tmp_path))}


def test_the_calibration_text_is_a_source(plain, tmp_path):
    out = tmp_path / "out"
    convert(plain, out)
    (out / "LICENSE.txt").write_text(TEXT)
    (tmp_path / "link").symlink_to(out / "LICENSE.txt")
    before = contents(out)
    for text in (out / "LICENSE.txt", str(out), str(tmp_path / "link")):
        with pytest.raises(FileExistsError, match="out is the source, or contains it"):
            convert_checkpoint(plain, out, data=text, knee=0, overwrite=True)
    assert contents(out) == before


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [("access", False, "may not be written to: give another folder"), ("path.ismount", True, "mount point")],
)
def test_unwritable_places_are_refused_before_reading(name, answer, message, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(f"os.{name}", lambda *arguments: answer)
    with pytest.raises(OSError, match=message):
        convert_checkpoint("./no-such-source", tmp_path / "out", data=["text"])


def test_a_card_keeps_the_old_readme(run):
    card, kept = run / "README.md", run / KEPT_CARD
    card.write_text("my notes")
    assert [path.name for path in write_card(run)] == ["README.md", KEPT_CARD]
    assert kept.read_text() == "my notes"
    ours = card.read_text()
    assert [path.name for path in write_card(run)] == ["README.md"]
    assert (card.read_text(), kept.read_text()) == (ours, "my notes")
    card.write_text("other notes")
    before = contents(run)
    with pytest.raises(FileExistsError, match=r"would be kept as .*original.md, which exists already"):
        write_card(run)
    assert contents(run) == before


def test_a_picture_does_not_replace_its_log(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model, log = patch_model(tiny_model("llama"), "none"), tmp_path / "log.jsonl"
    with LogitMonitor(every=1, path=log).watch(model, 0):
        model(**{"input_ids": model.dummy_inputs["input_ids"]})
    before = contents(tmp_path)
    (tmp_path / "link.png").symlink_to(log)
    for out in ("log.jsonl", "./x/../log.jsonl", str(log), "link.png", "", str(tmp_path)):
        assert cli.main(["monitor", "log.jsonl", "--out", out]) == 1
        assert "hf-qknorm: " in capsys.readouterr().err
        assert {name: data for name, data in contents(tmp_path).items() if name != "link.png"} == before
