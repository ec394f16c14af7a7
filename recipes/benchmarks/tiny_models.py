"""Tiny models of the tests, for benchmarks that need no particular model."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))

from tiny import tiny_model  # noqa: E402

__all__ = ["tiny_model"]
