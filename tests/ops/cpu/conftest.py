"""The C++ kernels are compiled once a machine; where they can't be, their tests are skipped, with the reason."""

from __future__ import annotations

import os

import pytest

from hf_qknorm.ops.cpu import build


@pytest.fixture(autouse=True, scope="session")
def compiled() -> None:
    """Skip without kernels; HF_QKNORM_CPU=1, as CI has it, makes that a failure."""
    reason = build.why_not_built()
    if reason is not None and os.environ.get("HF_QKNORM_CPU") != "1":
        pytest.skip(reason)
    assert reason is None
