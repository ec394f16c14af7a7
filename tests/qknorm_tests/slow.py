"""Cases of tests that are left to `pytest -m slow`."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(few: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, each a value or a tuple of several, as parameters; all but the `few` are slow."""
    return [case if case in few else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
