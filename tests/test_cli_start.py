"""The command before the package is imported: help, version and wrong arguments need no torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hf_qknorm
import hf_qknorm_command

WITHOUT_TORCH = """
import sys, hf_qknorm_command
try:
    hf_qknorm_command.main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--help"], 0, "usage: hf-qknorm [-h] [--version] [--print-completion SHELL] COMMAND"),
        (["--version"], 0, f"{hf_qknorm.__version__}\n"),
        (["convert", "--help"], 0, "--data TEXT"),
        (["inspect"], 2, "the following arguments are required: CKPT"),
    ],
)
def test_help_version_and_usage_errors_do_not_import_torch(arguments, status, text):
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert text in done.stdout + done.stderr


def test_the_version_is_that_of_the_code_and_not_of_the_installation(tmp_path):
    shutil.copytree(Path(hf_qknorm_command.__file__).parent, tmp_path / "hf_qknorm_command")
    (tmp_path / "hf_qknorm").mkdir()
    (tmp_path / "hf_qknorm" / "version.py").write_text('__version__ = "99.0"\n')
    command = [sys.executable, "-c", "import hf_qknorm_command; hf_qknorm_command.main(['--version'])"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "99.0\n", done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such shell")
def test_a_command_runs_without_an_output():
    code = "import sys, hf_qknorm_command; sys.exit(hf_qknorm_command.main())"
    command = ["sh", "-c", f'"$0" -c "{code}" --version >&-', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
