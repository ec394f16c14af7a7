"""Cards, plots and demos never overwrite their sources, and replace only what they wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hf_qknorm import LogitMonitor, cli, patch_model
from hf_qknorm.convert.card import write_card
from hf_qknorm.demo import run_demo
from hf_qknorm.files.names import KEPT_CARD
from qknorm_tests.folders import contents, save_with_tokenizer
from qknorm_tests.tiny import tiny_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A patched checkpoint."""
    return save_with_tokenizer(patch_model(tiny_model("llama", vocab_size=300), "qk_norm"), tmp_path / "run")


def demo(src: Path, dst: Path) -> object:
    return run_demo(checkpoint=str(src), out=str(dst))


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
    with pytest.raises(FileExistsError, match=r"would be replaced, and its copy .*original.md exists already"):
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


DEMO = {
    "a file of another": ("thesis.txt", r"demo contains other files, which overwriting would delete.*: thesis\.txt"),
    "a state of training": ("model/optimizer.pt", r"demo contains other files, .*: model/optimizer\.pt"),
    "a folder of another": ("model/notes/x", r"demo contains other files, .*: model/notes/"),
}


@pytest.mark.parametrize("what", DEMO)
def test_a_demo_replaces_only_a_demo(what, run, tmp_path):
    file, message = DEMO[what]
    out = tmp_path / "demo"
    shutil.copytree(run, out / "model")
    (out / "demo.png").write_text("my own")
    with pytest.raises(FileExistsError, match=r"demo holds no report.json"):
        demo(run, out)
    (out / "report.json").write_text("{}")
    (out / file).parent.mkdir(exist_ok=True)
    (out / file).write_text("precious")
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=message):
        demo(run, out)
    with pytest.raises(FileExistsError, match="is the source, or contains it"):
        run_demo(data=str(out / "model"), out=str(out))
    assert contents(tmp_path) == before
