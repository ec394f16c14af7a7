"""`hf-qknorm demo`: its files, its tables, its end by Ctrl-C, and the command that it names as the next step."""

import json
import os
import shlex
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import Calibration, cli, plots
from hf_qknorm import demo as demo_module
from hf_qknorm.demo import run_demo
from hf_qknorm.scheme import SCHEMES
from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tiny import tiny_model

FILES = ["demo.json", "demo.png", "model"]
DEMO = ["demo", "--data", "corpus.txt", "--base-steps", "2", "--steps", "2", "--out", "out"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    """An empty working directory with a text, where the demo's Llama is a tiny one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    small = partial(tiny_model, "llama", vocab_size=257, max_position_embeddings=512)
    monkeypatch.setattr(demo_module, "small_llama", lambda layers: small())
    return tmp_path


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Figures take half of a test's time: one test draws them."""
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: path.write_bytes(b"\x89PNG"))


@pytest.mark.costly
def test_a_demo_prints_and_writes_everything(here, capsys, monkeypatch):
    draw = plots.draw_demo  # until the last run, not at all
    monkeypatch.setattr(plots, "draw_demo", lambda *given: draw(*given) if len(given[1]) > 3 else given[2].touch())
    assert cli.main([*DEMO, "--out", "my demo"]) == 0
    out, printed = here / "my demo", capsys.readouterr().out
    report = json.loads((out / "demo.json").read_text())
    assert list(report["conversion"]) == ["unpatched", "fresh gains", "calibrated"]
    assert [(run["model"], run["rate"]) for run in report["runs"]] == [
        ("unpatched", 0.01),
        ("calibrated", 0.01),
        ("unpatched", 0.001),
        ("calibrated", 0.001),
    ]
    for run in report["runs"]:
        assert list(run["measured"]) == ["0", "1", "2"]
        assert run["measured"]["0"] == report["conversion"][run["model"]]
        assert f"{run['measured']['2']['loss']:.3f}" in printed
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(out)) == FILES
    assert "figure: my demo/" in printed
    assert max(map(len, printed.splitlines())) <= 120
    check_checkpoint(out / "model", report)
    line = next(line for line in printed.splitlines() if line.startswith("next step: "))
    command, *arguments = shlex.split(line.removeprefix("next step: ").partition(" (")[0])
    assert command == "hf-qknorm"
    assert cli.main([*arguments, "--data", "corpus.txt", "--max-tokens", "512"]) == 0


def check_checkpoint(folder: Path, report: dict) -> None:
    """It loads, with its tokenizer, and has the record of its calibration and a card with the record's figures."""
    calibration = Calibration.load(folder / "qk_norm_report.json")
    assert calibration.chosen == Calibration.from_dict(report["calibration"]).chosen
    scheme = AutoModelForCausalLM.from_pretrained(folder).config.scheme
    assert scheme == calibration.scheme == SCHEMES["qk_norm_cap"].resolve()
    assert (calibration.knee, calibration.sharpness) == (0, 1)  # the random model needs none
    assert AutoTokenizer.from_pretrained(folder).decode([1, 2])
    card = (folder / "README.md").read_text()
    assert "without calibration text" not in card
    assert f"{calibration.loss:.3f}" in card


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.usefixtures("default_signals", "undrawn")
@pytest.mark.costly
def test_an_interrupted_demo_keeps_its_results(here, capsys, monkeypatch):
    """Ctrl-C in the conversion leaves an earlier demo; in the second run, the first run's results are there."""
    earlier = {"demo.json": "{}", "demo.png": "of an earlier demo"}
    (here / "out").mkdir()
    for name, text in earlier.items():
        (here / "out" / name).write_text(text)
    measure, calls = demo_module.measure, iter(range(100))

    def measured(model, batches):
        if next(calls) in (2, 3 + 3 + 2 + 1):  # of the first demo, and of the second
            os.kill(os.getpid(), signal.SIGINT)
        return measure(model, batches)

    monkeypatch.setattr(demo_module, "measure", measured)
    assert cli.main([*DEMO, "--scheme", "soft_cap"]) == 130
    assert {path.name: path.read_text() for path in (here / "out").iterdir()} == earlier
    assert cli.main([*DEMO, "--scheme", "soft_cap"]) == 130
    assert capsys.readouterr().err.endswith("hf-qknorm: stopped; a file or folder is written whole or not at all\n")
    assert sorted(os.listdir("out")) == FILES
    assert [len(run["measured"]) for run in json.loads((here / "out" / "demo.json").read_text())["runs"]] == [3]
    assert (here / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert AutoModelForCausalLM.from_pretrained("out/model").config.scheme.softcap == 50


@pytest.mark.usefixtures("undrawn")
@pytest.mark.costly
def test_a_checkpoint_is_converted_and_not_trained(here, capsys):
    model = tiny_model("llama", vocab_size=257, max_position_embeddings=512, initializer_range=0.5)
    save_with_tokenizer(model, here / "source")
    assert cli.main(["demo", "--data", "corpus.txt", "--checkpoint", "source", "--out", "out"]) == 0
    assert json.loads((here / "out" / "demo.json").read_text())["runs"] == []
    assert "trained on" not in capsys.readouterr().out


@pytest.mark.parametrize(("checkpoint", "expected"), [(None, 1), ("CKPT", 2)])
def test_the_small_llama_computes_with_one_thread(here, monkeypatch, checkpoint, expected):
    seen = []

    def stop(*_: object) -> None:
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_module, "_prepare", stop)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_demo(checkpoint=checkpoint)
        assert (seen, torch.get_num_threads()) == ([expected], 2)
    finally:
        torch.set_num_threads(before)
