"""The commands: on small models, and before torch is imported, where they take a fraction of a second."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.main import get_command

import hf_qknorm
from hf_qknorm import FAMILIES, SCHEMES, LogitMonitor, Scheme, cli, patch_model
from qknorm_tests.children import child
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


COMMANDS = ("demo", "inspect", "convert", "export", "card", "push", "monitor", "doctor", "families", "schemes")
SECONDS = 0.5  # of CPU
# The script that an installation writes, which also prints the modules that were imported, and the CPU time.
SCRIPT = """
import sys, time
from hf_qknorm.cli import main
status = main()
heavy = [name for name in ("torch", "transformers", "matplotlib") if name in sys.modules]
print(heavy, time.process_time(), file=sys.stderr)
sys.exit(status)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bin") / "hf-qknorm"
    path.write_text(SCRIPT)
    return path


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True)


def test_the_commands_are_those():
    assert tuple(get_command(cli.app).commands) == COMMANDS


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--help"], 0, "Usage: hf-qknorm [OPTIONS] COMMAND"),
        (["--version"], 0, f"{hf_qknorm.__version__}\n"),
        *(([name, "--help"], 0, f"Usage: hf-qknorm {name}") for name in COMMANDS[:3]),
        (["inspect"], 2, "hf-qknorm: Missing argument 'CKPT'. (see hf-qknorm inspect --help)\n"),
        (["schemes"], 0, "qk_norm_cap "),
    ],
)
def test_help_version_and_usage_errors_do_not_import_torch(script, monkeypatch, arguments, status, text):
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")  # which has no ≥
    done = run(script, *arguments)
    assert done.returncode == status, done.stderr
    assert text in done.stdout + done.stderr
    heavy, seconds = done.stderr.splitlines()[-1].rsplit(maxsplit=1)
    assert heavy == "[]"
    assert float(seconds) < SECONDS


def test_in_the_command_hooks_are_installed_before_a_model_is_loaded(tmp_path):
    known = 'import transformers; print("qknorm_llama" in transformers.CONFIG_MAPPING)'
    assert child(f"from hf_qknorm.cli import main\nmain()\n{known}\n", "families", home=tmp_path).endswith("True\n")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such shell")
def test_a_closed_output_ends_the_command_silently(script):
    command = ["sh", "-c", '"$0" "$1" schemes | true', sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Traceback" not in done.stdout + done.stderr
