"""The command before the package is imported: help, version and wrong arguments need no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hf_qknorm
import hf_qknorm_command
from hf_qknorm.cli import COMMANDS

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
        (["--help"], 0, "usage: hf-qknorm [-h] [--version] COMMAND"),
        (["--version"], 0, f"{hf_qknorm.__version__}\n"),
        (["convert", "--help"], 0, "--calibrate TEXT"),
        (["inspect"], 2, "the following arguments are required: CKPT"),
    ],
)
def test_help_version_and_usage_errors_do_not_import_torch(arguments, status, text):
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert text in done.stdout + done.stderr


def test_every_command_is_listed_in_the_help(capsys):
    with pytest.raises(SystemExit):
        hf_qknorm_command.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n    {name} " in text for name in COMMANDS)
