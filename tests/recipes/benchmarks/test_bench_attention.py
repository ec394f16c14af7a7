"""The attention benchmark: its small mode from end to end, and its behaviour on faults."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which interprets the kernels")

import bench_attention as bench
import bench_checks as checks
import bench_plan as plan
from bench_cases import Case
from bench_implementations import FLASH, OURS

from hf_qknorm.ops import library

RECIPE = Path(bench.__file__)
CPU = torch.device("cpu")
SMALL = Case(2, 1, 16, 40)

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where no GPU is")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Run the benchmark in this process, with its checks, on one small case; return the exit code and the rows."""

    def in_process(jobs, part, arguments, processes, seconds):
        return [verdict for job in jobs.values() for verdict in checks.check_job(job, CPU, torch.float32)]

    def run(*options, implementations=(FLASH, OURS), apart=False):
        monkeypatch.setattr(checks, "run_checks", in_process)
        parts = [[plan.Item(SMALL, (x,), ("forward",))] for x in implementations] if apart else None
        whole = [[plan.Item(SMALL, implementations, ("forward",))]]
        monkeypatch.setattr(bench, "tiny_plan", lambda: parts or whole)
        code = bench.main(["--cpu", "--out", str(tmp_path), *options])
        return code, rows(tmp_path)

    return run


def rows(folder):
    path = folder / "attention_interpreter.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def wrong(monkeypatch):
    """Our attention, with an error of a tenth."""
    right = library.fused_attention
    monkeypatch.setattr(library, "fused_attention", lambda *tensors, **options: 1.1 * right(*tensors, **options))


@pytest.mark.slow
@interpreted
def test_the_small_mode_runs_completely(tmp_path):
    run = subprocess.run(
        [sys.executable, RECIPE, "--cpu", "--out", tmp_path, "--commit", "abc"],
        env=os.environ | {"PYTHONPATH": str(RECIPE.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = {(row["case"], row["what"], row["kind"]): row for row in rows(tmp_path)}
    for item in (item for part in plan.tiny_plan() for item in part):
        shown = item.implementations[0 if item.shown else 1 :]
        for named in shown:
            mine = [row for (case, what, _), row in found.items() if case == str(item.case) and what == named.name]
            assert mine, (item, named.name)
            for row in mine:
                assert_filled(row, named)
    page = (tmp_path / "attention_interpreter.md").read_text()
    assert "its numbers mean nothing" in page
    assert page.count("\n| ") == len(rows(tmp_path)) + 1


def assert_filled(row, named):
    """A row has its numbers, or the reason for their absence; our own rows have them."""
    assert row["commit"] == "abc"
    assert row["card"]
    assert row["torch"]
    assert row["dtype"] == "float32"
    if row["note"]:
        assert not named.ours
        assert not row["ms_median"]
        return
    assert 0 < float(row["ms_min"]) <= float(row["ms_median"]) <= float(row["ms_max"])
    assert float(row["rate"]) > 0
    assert row["unit"] in ("TFLOP/s", "GB/s")
    if named.ours:
        assert float(row["error"]) < 1e-5


@interpreted
def test_a_failed_check_ends_the_benchmark(small, wrong, capsys):
    code, found = small()
    assert code == 1
    assert found == []
    complaint = capsys.readouterr().err
    assert f"FAILED {SMALL.at(48)} | {OURS.name}: out 1.0e-01 over its budget of " in complaint


def fail(case, x):
    raise RuntimeError("no kernel\nand more")


@interpreted
def test_a_failure_of_another_library_is_a_row(small):
    other = replace(FLASH, name="other", attend=fail)
    code, found = small(implementations=(FLASH, other))
    assert code == 0
    assert {row["what"]: row["note"] for row in found} == {
        FLASH.name: "",
        "other": "not timed: RuntimeError: no kernel",
    }
    code, _ = small("--keep-going", implementations=(FLASH, replace(other, name="ours, failing")))
    assert code == 1


def test_a_checking_process_that_dies_fails_its_open_checks(monkeypatch):
    done = checks.Checked(str(SMALL), FLASH.name, False, {})
    monkeypatch.setattr(checks, "run_process", lambda *_: ([done], "the process ended with -11: "))
    found = checks.run_checks({3: checks.Job(SMALL, (OURS, FLASH))}, 0, [], 2)
    assert [verdict.passed for verdict in found] == [True, False]
    assert str(found[1]) == f"FAILED {SMALL} | {OURS.name}: the process ended with -11: "


@pytest.mark.parametrize(
    "part", [plan.quick_plan(), *plan.full_plan(), *plan.tiny_plan()], ids=lambda part: str(part[0])
)
def test_everything_timed_is_checked_first(part):
    """Each part checks and compiles what it times."""
    jobs = plan.check_jobs(part, 512)
    judged = {(job.case, x.name) for job in jobs for x in job.implementations}
    assert judged == {(item.case.at(512), x.name) for item in part for x in item.implementations}
    timed = [pair for job in jobs for pair in zip(job.implementations, job.timed, strict=True)]
    compiled = {(case, x.name) for x, cases in timed for case in cases}
    assert compiled == {(item.case, x.name) for item in part for x in item.implementations}
