"""The end of the command after a signal."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from hf_qknorm import cli
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
