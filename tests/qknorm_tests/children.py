"""Python child processes, each with its own home for the code that transformers copies."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

WITHOUT_PACKAGE = Path(__file__).with_name("without_package.py")
FORKS = Path(__file__).with_name("forks.py")


def child(script: str | Path, *arguments: str | Path, home: Path, fresh: bool = False) -> str:
    """Run a file, or code, where torch alone is imported, and return its standard output.

    A `fresh` process has imported nothing, and its standard error must be empty.
    """
    environment = {**os.environ, "HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules")}
    given = [str(script), *map(str, arguments)]
    if fresh or not hasattr(os, "fork"):
        command = [sys.executable, *([] if isinstance(script, Path) else ["-c"]), *given]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        code, out, err = ran.returncode, ran.stdout, ran.stderr
    else:
        with TemporaryDirectory() as folder:
            request = {"arguments": given, "file": isinstance(script, Path), "environment": environment}
            code = _forked({**request, "streams": folder, "directory": os.getcwd()})
            out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    assert code == 0, err[-3000:]
    assert not (fresh and err), err
    return out


@cache
def _server(interpret: str | None) -> subprocess.Popen[str]:
    """One for each TRITON_INTERPRET, which Triton reads when torch imports it.

    It ends with this process, whose end closes its input.
    """
    return subprocess.Popen([sys.executable, str(FORKS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _forked(request: dict[str, object]) -> int:
    """The exit code of a request to `forks.py`."""
    server = _server(os.environ.get("TRITON_INTERPRET"))
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())
