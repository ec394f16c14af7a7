"""The completion scripts, and completions that bash makes with one."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from hf_qknorm import cli
from hf_qknorm.calibration.options import METHODS
from hf_qknorm.commands import COMMANDS
from hf_qknorm.scheme import SCHEMES

CASES = [
    ("conv", ["convert"]),
    ("doc", ["doctor"]),
    ("--pr", ["--print-completion"]),
    ("convert --meth", ["--method"]),
    ("convert --method ", list(METHODS)),
    ("convert --knee ", ["auto"]),
    ("convert --scheme ", list(SCHEMES)),
    ("demo --scheme qk", [name for name in SCHEMES if name.startswith("qk")]),
    ("convert model-a out --data mod", ["model-a", "model.jsonl"]),
    ("inspect mod", ["model-a"]),
    ("inspect model-a --texts model.", ["model.jsonl"]),
    ("export mod", ["model-a"]),
    ("monitor model.", ["model.jsonl"]),
]
# Prints what bash completes the words of $2 with, the last of which is incomplete, by the script $1.
COMPLETE = """
source "$1"; cd "$3"; read -ra COMP_WORDS <<< "hf-qknorm $2"; [[ "$2" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); _shtab_hf_qknorm 2>/dev/null; printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The script that the command prints."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["--print-completion", shell])
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_the_script_names_every_command(capsys, shell):
    pytest.importorskip("shtab")
    text = script(shell, capsys)
    assert all(name in text for name in (*COMMANDS, "doctor"))


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_values_and_paths(capsys, tmp_path):
    pytest.importorskip("shtab")
    file, places = tmp_path / "script", tmp_path / "places"
    file.write_text(script("bash", capsys))
    (places / "model-a").mkdir(parents=True)
    (places / "model.jsonl").touch()
    for words, expected in CASES:
        done = subprocess.run(["bash", "-c", COMPLETE, "bash", file, words, places], capture_output=True, text=True)
        assert sorted(done.stdout.split()) == sorted(expected), words


def test_without_shtab_the_error_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["--print-completion", "bash"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("hf-qknorm: --print-completion needs shtab: pip install shtab")
    assert error.count("\n") == 1
