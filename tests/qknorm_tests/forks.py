"""A process with torch, and with what transformers imports of it, which runs scripts in forks of itself.

These imports take a new process longer than most scripts do.
"""

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401

SECONDS = 900  # for a script


def run(request: dict[str, Any]) -> None:
    """Run a script as `python FILE ...` or `python -c CODE ...` would, with its own streams."""
    signal.alarm(SECONDS)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    for number, name in enumerate((os.devnull, "out", "err")):
        file = os.open(Path(request["streams"], name), os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
    script = request["arguments"][0]
    sys.argv = request["arguments"] if request["file"] else ["-c", *request["arguments"][1:]]
    if request["file"]:
        sys.path[0] = str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
    else:
        sys.path[0] = ""
        exec(compile(script, "<string>", "exec"), vars(sys.modules["__main__"]))


if __name__ == "__main__":
    for line in sys.stdin:
        process = os.fork()
        if not process:
            run(json.loads(line))
            break
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}\n")
        sys.stdout.flush()
