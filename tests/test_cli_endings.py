"""The end of the command: after signals, with a closed output, and on a terminal that shows ASCII only."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from hf_qknorm import cli, commands, patch_model
from hf_qknorm.convert import card, convert
from hf_qknorm.demo.training import byte_tokenizer
from hf_qknorm.training import logit_plots
from qknorm_tests.tiny import tiny_model

STOPS = {"Ctrl-C": signal.SIGINT, "terminated": signal.SIGTERM, "hung up": getattr(signal, "SIGHUP", signal.SIGTERM)}
posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals and pipes")


def stopping(number: signal.Signals = signal.SIGINT):
    """A function that signals the process, to be called in place of the real one."""

    def stop(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was ignored")

    return stop


@pytest.fixture
def places(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model = tiny_model("llama", vocab_size=300)
    model.save_pretrained("source")
    byte_tokenizer().save_pretrained("source")
    patch_model(model, "qk_norm").save_pretrained("ours")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return tmp_path


def stopped(arguments: list[str], capsys) -> tuple[int, str]:
    status = cli.main(arguments)
    return status, capsys.readouterr().err.rpartition("hf-qknorm: ")[2]


@posix
@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", STOPS.values(), ids=STOPS)
def test_an_interrupted_conversion_leaves_the_destination_unchanged(places, capsys, monkeypatch, number):
    monkeypatch.setattr(convert, "copy_files", stopping(number))
    status, error = stopped(["convert", "source", "out"], capsys)
    assert (status, error) == (128 + number, f"stopped by {number.name}: nothing was written\n")
    assert sorted(os.listdir(places)) == ["ours", "source", "text.txt"]
    monkeypatch.undo()
    monkeypatch.chdir(places)
    assert cli.main(["convert", "source", "out"]) == 0
    monkeypatch.setattr(convert, "copy_files", stopping(number))
    before = (places / "out" / "config.json").stat()
    status, error = stopped(["convert", "source", "out", "--overwrite"], capsys)
    assert (status, error) == (128 + number, f"stopped by {number.name}: nothing was written; as before: out\n")
    assert (places / "out" / "config.json").stat() == before
    assert sorted(os.listdir(places)) == ["ours", "out", "source", "text.txt"]
    if number != signal.SIGINT:
        assert signal.getsignal(number) is signal.SIG_DFL


@posix
@pytest.mark.usefixtures("default_signals")
def test_an_interrupted_command_names_the_files_that_it_wrote(places, capsys, monkeypatch):
    monkeypatch.setattr(commands, "check_target", lambda *_, **__: None)
    monkeypatch.setattr(commands, "push_to_hub", stopping())
    commit = "me/tiny gets the whole commit or nothing of it; push again to go on"
    status, error = stopped(["convert", "source", "out", "--push", "me/tiny"], capsys)
    assert (status, error) == (130, f"stopped by SIGINT: {commit}; written whole: out\n")
    assert stopped(["push", "out", "me/tiny"], capsys) == (130, f"stopped by SIGINT: {commit}\n")
    monkeypatch.setattr(card, "replace_text", stopping())
    assert stopped(["card", "ours"], capsys) == (130, "stopped by SIGINT: nothing was written\n")
    monkeypatch.setattr(logit_plots, "draw_log", stopping())
    monkeypatch.setattr("hf_qknorm.training.logit_log.read_log", lambda path: [path])
    assert stopped(["monitor", "log"], capsys) == (130, "stopped by SIGINT: nothing was written\n")
    monkeypatch.setattr("hf_qknorm.inspection.plots.heat_map", stopping())
    status, error = stopped(["inspect", "source", "--texts", "text.txt", "--tokens", "256"], capsys)
    assert (status, error) == (130, "stopped by SIGINT: written whole: qknorm-inspect/inspect.json\n")
    monkeypatch.setattr(commands, "export_native", stopping())
    assert stopped(["export", "ours", "new"], capsys) == (130, "stopped by SIGINT: nothing was written\n")
    monkeypatch.setitem(commands.COMMANDS, "families", stopping())
    assert stopped(["families"], capsys) == (130, "stopped by SIGINT: nothing was written\n")


class Interrupted(ModuleType):
    """A module whose import is interrupted."""

    def __getattr__(self, name: str) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_import_of_the_package_is_reported_in_one_line(capsys, monkeypatch):
    root = Path(__file__).parents[1]
    module = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]["hf-qknorm"].partition(":")[0]
    command = runpy.run_path(str(root / module / "__init__.py"))["main"]
    monkeypatch.setattr(sys, "argv", ["hf-qknorm", "schemes"])
    assert command() == 0
    assert "qk_norm_cap" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "hf_qknorm.commands", Interrupted("hf_qknorm.commands"))
    assert command() == 130
    assert capsys.readouterr().err == "hf-qknorm: stopped by SIGINT: nothing was written\n"


# Runs several commands in one process.
ALL = """
import sys
from collections.abc import Iterator
from hf_qknorm import cli
for command in sys.argv[1].split("; "):
    try:
        assert cli.main(command.split()) == 0, command
    except SystemExit as stop:
        assert stop.code == 0, command
"""
COMMANDS = (
    "--help; convert --help; schemes; families; convert source out --dry-run; convert source out --scheme qk_norm "
    "--data text.txt --method moments; inspect out --texts text.txt --tokens 512; export out new; card out"
)


@pytest.mark.slow
def test_every_command_prints_on_an_ascii_terminal(places):
    ascii_alone = {"PYTHONIOENCODING": "ascii", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-c", ALL, COMMANDS],
        env=environment | ascii_alone, capture_output=True, text=True, encoding="ascii", timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "out \\u2192 new: Qwen3ForCausalLM" in done.stdout


@pytest.mark.costly
@posix
def test_a_closed_output_ends_the_command_silently(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-m", "hf_qknorm.cli", "families"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    ) as process:  # fmt: skip
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(timeout=300) == 141
    assert "Broken pipe" not in error
    assert "Traceback" not in error
