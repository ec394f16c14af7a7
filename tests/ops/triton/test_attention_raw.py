"""Fused attention of raw heads, with their norms and rotation, against the oracle: output and every gradient."""

from __future__ import annotations

import pytest

from qknorm_tests.covering import covering
from qknorm_tests.kernel_cases import Raw, raw_problem, shrink_tiles, use_pointers
from qknorm_tests.norm_cases import CASES
from qknorm_tests.tiled_cases import Case

RAWS = [raw._replace(length=min(raw.length, 34)) for raw in CASES if raw.spread == 1][::2]
OPTIONS = [
    Case(causal=True),
    Case(causal=True, softcap=50.0),
    Case(causal=True, window=20, softcap=100.0),
    Case(softcap=5.0),
    Case(window=20),
    Case(ranges="left_padding", softcap=50.0),
    Case(ranges="packed"),
    Case(sinks=True, softcap=50.0),
]


@pytest.mark.parametrize(
    ("raw", "case", "scale", "pointers"), covering(RAWS, OPTIONS, [None, 1.0], [False, True], strength=1), ids=str
)
def test_output_and_gradients(
    raw: Raw, case: Case, scale: float | None, pointers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_tiles(monkeypatch)
    if pointers:
        use_pointers(monkeypatch)
    raw_problem(raw, case, scale).check()
