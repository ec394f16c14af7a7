"""The folder of files that this machine can make again: compiled kernels, and verdicts on kernels."""

import os
from pathlib import Path


def folder() -> Path:
    """`$XDG_CACHE_HOME/hf_qknorm`, by default `~/.cache/hf_qknorm`. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hf_qknorm")
