"""The command before torch is imported: help, version and wrong arguments take a fraction of a second."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import hf_qknorm
from hf_qknorm import cli
from qknorm_tests.children import child

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
