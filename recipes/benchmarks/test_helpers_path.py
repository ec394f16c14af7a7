"""Importing this module puts the tests' helpers on Python's path: tiny models, random inputs, the error budget."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))
