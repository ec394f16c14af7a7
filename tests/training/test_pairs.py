"""A pair of processes that fails takes the tests of its own task with it, and shows where both ranks were."""

from __future__ import annotations

from pathlib import Path

import pytest
from pair import of_task, run_pairs

TASKS = ("before", "crashes", "hangs", "raises", "expected", "after")
FAILED = {
    "crashes": ("(1, -11)", "Segmentation fault", "in crash"),
    "hangs": ("(-9, -11)", "Segmentation fault", "in crash"),
    "raises": ("(1, 1)", "ValueError: rank 1 is wrong", "in main"),
}


@pytest.mark.slow
def test_the_crash_of_a_pair_fails_its_own_task(tmp_path: Path) -> None:
    run_pairs("failing_run", tmp_path, TASKS)
    for task in TASKS:
        assert (tmp_path / f"{task} 0").exists()
        if task not in FAILED:
            assert of_task(tmp_path, task) == tmp_path
            continue
        with pytest.raises(pytest.fail.Exception) as failure:
            of_task(tmp_path, task)
        codes, error, place = FAILED[task]
        head, first, second = str(failure.value).split("-- rank ")
        assert head == f"{task}: exit codes {codes}, expected (0, 0)\n"
        assert ("in main" if task == "hangs" else "in wait_for_partner") in first
        assert error in second
        assert place in second
