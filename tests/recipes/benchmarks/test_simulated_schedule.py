"""The simulated schedule: near the ideal where there are enough programs, and never slower than head after head."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton: the kernels' tiles are simulated")
recipe = import_module("schedule")
makespan = import_module("hf_qknorm.ops.triton.schedule").makespan
RESULTS = Path(__file__).parents[3] / "recipes" / "results" / "schedule.md"


@pytest.mark.parametrize("shape", recipe.SHAPES, ids=str)
def test_schedules_are_near_the_ideal(shape):
    kernels = [
        recipe.for_queries(shape, "forward"),
        recipe.for_queries(shape, "query_gradient"),
        recipe.for_keys(shape),
    ]
    for simulated in kernels:
        assert simulated.now <= simulated.before + 0.01
        assert simulated.now <= 1.09 * simulated.least
        assert simulated.now <= (1.03 if not shape.window else 1.06) + 18 / simulated.ideal
        if simulated.programs >= 600 and simulated.parts == 1:
            assert round(simulated.now, 2) <= (1.03 if not shape.window else 1.06)


def test_no_order_is_faster_than_the_least():
    costs = [5.0, 4.0, 3.0] * 100
    assert makespan(sorted(costs, reverse=True), recipe.HOPPER.processors) >= recipe.least(costs)
    assert recipe.least([7.0]) == 7
    assert recipe.least([2.0] * (recipe.HOPPER.processors + 1)) == 4


def test_the_page_is_that_of_the_schedule(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["schedule.py", "--output", str(tmp_path / "page.md")])
    recipe.main()
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == RESULTS.read_text(encoding="utf-8")
