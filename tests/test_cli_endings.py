"""The end of the command: after signals, with a closed output, and on a terminal that shows ASCII only."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hf_qknorm import cli, patch_model
from hf_qknorm.small_model import byte_tokenizer
from qknorm_tests.folders import contents
from qknorm_tests.tiny import tiny_model

STOPS = {"Ctrl-C": signal.SIGINT, "terminated": signal.SIGTERM}
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


@posix
@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", STOPS.values(), ids=STOPS)
def test_an_interrupted_conversion_leaves_the_destination_unchanged(places, capsys, monkeypatch, number):
    assert cli.main(["convert", "source", "kept"]) == 0
    before = contents(places)
    monkeypatch.setattr("hf_qknorm.convert.convert.write_card", stopping(number))
    for arguments in (["convert", "source", "out"], ["convert", "source", "kept", "--overwrite"]):
        capsys.readouterr()
        assert cli.main(arguments) == 130
        assert capsys.readouterr().err == "hf-qknorm: stopped; a file or folder is written whole or not at all\n"
        assert contents(places) == before


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
    "--data text.txt --knee 4; inspect out --data text.txt --max-tokens 512; export out new; card out"
)


@pytest.mark.slow
def test_every_command_prints_on_an_ascii_terminal(places):
    ascii_alone = {"PYTHONIOENCODING": "ascii", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-c", ALL, COMMANDS],
        env=environment | ascii_alone, capture_output=True, text=True, encoding="utf-8", timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"out (→|\\u2192) new: Qwen3ForCausalLM", done.stdout)  # click writes UTF-8 there
