"""The commands, on small models."""

import dataclasses
import json
import os
import signal
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_qknorm import FAMILIES, SCHEMES, LogitMonitor, Scheme, cli, patch_model
from qknorm_tests.folders import contents, save_with_tokenizer
from qknorm_tests.tiny import tiny_model


def test_schemes_and_families_are_listed(capsys):
    assert cli.main(["schemes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(SCHEMES)]] == list(SCHEMES)
    fields = {field.name for field in dataclasses.fields(Scheme)}
    assert fields == {line.split()[0] for line in lines[-len(fields) :]}, "every field is listed"
    assert cli.main(["families"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == sorted(FAMILIES)


@pytest.fixture
def source(tmp_path) -> str:
    """A tiny Llama with a tokenizer."""
    return str(save_with_tokenizer(tiny_model("llama", vocab_size=300), tmp_path / "source"))


def test_convert(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["convert", source, str(out), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "scheme      q=rms, k=rms, softcap=50.0" in text
    assert "dry run: nothing was written" in text
    assert not out.exists()
    assert cli.main(["convert", source, str(out)]) == 0
    assert "the gains are fresh" in capsys.readouterr().out
    assert cli.main(["convert", source, str(out)]) == 1
    assert "is not empty: give another destination, or overwrite=True (--over" in capsys.readouterr().err
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    options = ["--data", str(tmp_path / "corpus.txt"), "--knee", "4", "--overwrite", "--length", "48"]
    scheme = ["--scheme", '{"q": "rms", "k": "rms", "gain": "per_head"}']
    assert cli.main(["convert", source, str(out), *options, *scheme]) == 0
    text = capsys.readouterr().out
    assert "fresh gains" in text
    assert text.endswith(
        f"written: {out}\nload it with `import hf_qknorm` or trust_remote_code=True, by from_pretrained\n"
    )
    assert AutoModelForCausalLM.from_pretrained(out).config.scheme.gain == "per_head"
    assert json.loads((out / "qk_norm_report.json").read_text())["length"] == 48
    assert cli.main(["convert", source, str(tmp_path / "new"), *options, "--max-loss-increase", "-9"]) == 1
    assert "more than max_loss_increase=-9. A larger knee" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_conversion_leaves_the_destination_unchanged(source, tmp_path, capsys, monkeypatch, number):
    def stop(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was ignored")

    out, kept = str(tmp_path / "out"), str(tmp_path / "kept")
    assert cli.main(["convert", source, kept]) == 0
    before = contents(tmp_path)
    monkeypatch.setattr("hf_qknorm.convert.convert.write_card", stop)
    for arguments in (["convert", source, out], ["convert", source, kept, "--overwrite"]):
        capsys.readouterr()
        assert cli.main(arguments) == 130
        assert capsys.readouterr().err == "hf-qknorm: stopped; a file or folder is written whole or not at all\n"
        assert contents(tmp_path) == before


def test_inspect_prints_and_draws(source, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    assert cli.main(["inspect", "source", "--data", "text.txt", "--max-tokens", "512", "--cap", "30"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "source: llama, 2 layers of 4 heads",
        "unpatched",
        "model.layers.1.self_attn",
        "same top token  bound",
        "Advice, if logits grow in training: Scheme(q='auto', k='auto', softcap=30.0)",
    ):
        assert line in printed
    out = tmp_path / "qknorm-inspect"
    assert json.loads((out / "inspect.json").read_text())["tokens"] == 512
    assert (out / "inspect.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.iterdir()) == ["inspect.json", "inspect.png"]


def test_monitor_draws_a_log(tmp_path, capsys):
    model, log, out = patch_model(tiny_model("llama"), "none"), tmp_path / "log.jsonl", tmp_path / "out.png"
    monitor = LogitMonitor(every=1, path=log)
    for step in range(3):
        with monitor.watch(model, step):
            model(torch.arange(3, 20)[None])
    assert cli.main(["monitor", str(log), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "step 2: largest |logit| " in printed
    assert f"written: {out}" in printed
    assert out.read_bytes().startswith(b"\x89PNG")
