"""The processes that run commands on checkpoints, and the results on sound ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from broken.bases import BASES, twin, whole

SCHEME = "qk_norm_cap"  # what `worker.convert` puts on
Answer = dict[str, Any]
Facts = dict[str, dict[str, Answer]]


class Worker:
    """A process that answers requests (`broken.worker`)."""

    def __init__(self, kind: str, limit: int) -> None:
        self.limit = limit
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), kind]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )

    def __call__(self, command: str, **arguments: Any) -> Answer:
        request = {"command": command, "limit": self.limit, **arguments}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended at {command} {arguments}")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class Workers:
    """Two workers: one with transformers alone, one with the package."""

    def __init__(self, limit: int) -> None:
        self.plain, self.package = Worker("plain", limit), Worker("package", limit)

    def close(self) -> None:
        self.plain.close()
        self.package.close()


def build(root: Path, workers: Workers) -> Facts:
    """Build the sound checkpoints, and record the result of each command on them. Raises RuntimeError if one fails."""
    workers.package.limit, limit = 600, workers.package.limit
    needed(workers.package("build", root=str(root)))
    workers.package.limit = limit
    facts: Facts = {}
    for base in BASES.values():
        folder, unpatched = whole(root, base, "single"), twin(root, base, "single")
        facts[base.name] = {
            "load": needed(workers.package("load", folder=str(folder), auto=base.auto)),
            "twin": needed(workers.plain("load", folder=str(unpatched), auto=base.auto)),
            "convert": needed(workers.package("reference", folder=str(unpatched), auto=base.auto, scheme=SCHEME)),
        }
    return facts


def needed(answer: Answer) -> Answer:
    if answer["kind"] != "done" or answer.get("made_up"):
        raise RuntimeError(f"a whole checkpoint fails: {answer}")
    return answer
