"""The C++ kernels are compiled once a machine; where they can't be, their tests are skipped, with the reason."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _compiled(compiled: None) -> None:
    """Every test here needs them."""
