"""Python child processes, each with its own home for the code that transformers copies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WITHOUT_PACKAGE = Path(__file__).with_name("without_package.py")


def child(script: str | Path, *arguments: Path, home: Path, quiet: bool = False) -> str:
    """Run a file, or code, and return its standard output; with `quiet`, its standard error must be empty."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules")}
    command = [sys.executable, *([str(script)] if isinstance(script, Path) else ["-c", script]), *map(str, arguments)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert not (quiet and ran.stderr), ran.stderr
    return ran.stdout
