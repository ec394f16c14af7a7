"""Here the scheme "none" runs the shared forward too, which elsewhere leaves it to the model's own."""

import pytest

from hf_qknorm.model.layer import QKNormAttention as PlainAttention


@pytest.fixture(autouse=True)
def shared_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a family's projections, rotation and output would be compared with themselves."""
    monkeypatch.setattr(PlainAttention, "is_unchanged", False)
