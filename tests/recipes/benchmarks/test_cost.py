"""The table of costs, at its smallest size."""

from __future__ import annotations

from pathlib import Path

import cost
import pytest


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured on Linux only")
def test_the_cost_page_has_every_scheme(tmp_path):
    times = cost.main(["--size", "quick", "--turns", "3", "--out", str(tmp_path / "cost.md")])
    assert set(times) == set(cost.ARMS)
    assert all(len(runs) == 3 for runs in times.values())
    page = (tmp_path / "cost.md").read_text()
    assert "| baseline | " in page
    assert page.count("\n| ") == len(cost.ARMS) + 1
    assert cost.ratio([2.0, 2.0, 8.0], [1.0, 1.0, 2.0]).startswith("2.00 ")
