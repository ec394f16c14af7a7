"""Exports are compared bit by bit with transformers' own norms, which are in PyTorch."""

from __future__ import annotations

import pytest

from hf_qknorm.ops.cpu import build


@pytest.fixture(autouse=True)
def _in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.SWITCH, "0")
