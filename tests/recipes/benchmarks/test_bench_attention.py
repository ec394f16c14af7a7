"""The attention benchmark: its small mode from end to end, and its behaviour on faults."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which interprets the kernels")

import bench_attention as bench
import bench_checks as checks
import bench_plan as plan
from bench_cases import Case, draw, exactly, oracle
from bench_implementations import ARMS, FLASH, OURS, RIVALS, VARLEN, dense_mask, nothing
from bench_timing import Clock, Late, Run, limit
from error_budget import error

from hf_qknorm.ops import library, reference

RECIPE = Path(bench.__file__)
CPU = torch.device("cpu")
SMALL = Case(2, 1, 16, 40)
MASKED = (replace(SMALL, window=16), replace(SMALL, lengths=(25, 10, 5)))
HERE = [x for x in RIVALS if not x.missing(SMALL, "cpu")]

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where no GPU is")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Run the benchmark in this process, with its checks, on one small case; return the exit code and the rows."""

    def in_process(jobs, arguments, processes):
        return [verdict for job in jobs for verdict in checks.check_job(job, CPU, torch.float32)]

    def run(*options, implementations=(FLASH, OURS)):
        monkeypatch.setattr(bench, "run_checks", in_process)
        monkeypatch.setattr(bench, "tiny_plan", lambda: [plan.Item(SMALL, implementations, ("forward",))])
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
    for item in plan.tiny_plan():
        shown = (item.implementations or item.steps)[0 if item.shown else 1 :]
        for named in shown:
            mine = [row for (case, what, _), row in found.items() if case == item.title and what == named.name]
            assert mine, (item.title, named.name)
            for row in mine:
                assert_filled(row, named)
    for name in ("attention_interpreter.md", "attention_interpreter.png"):
        assert (tmp_path / name).stat().st_size > 1000
    assert "its numbers mean nothing" in run.stdout
    assert run.stdout.rstrip().splitlines()[-1].lstrip().startswith("ours: qk_norm_cap, torch.compile")


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
    assert row["unit"] in ("TFLOP/s", "GB/s", "ktok/s")
    if named.ours:
        assert float(row["error"]) < 1e-5


@interpreted
def test_a_failed_check_ends_the_benchmark(small, wrong, capsys):
    code, found = small()
    assert code == 1
    assert found == []
    complaint = capsys.readouterr().err
    assert f"FAILED {SMALL.at(48)} | {OURS.name}: out 1.0e-01 over its budget of " in complaint


@interpreted
def test_passing_implementations_are_timed_on_request(small, wrong):
    code, found = small("--keep-going")
    assert code == 1
    timed, failed = sorted(found, key=lambda row: row["what"])
    assert (timed["what"], failed["what"]) == (FLASH.name, OURS.name)
    assert float(timed["ms_median"]) > 0
    assert failed["note"] == "not timed: failed its check"


@interpreted
def test_a_failure_of_another_library_is_a_row(small):
    def fail(case, x):
        raise RuntimeError("no kernel\nand more")

    other = replace(FLASH, name="other", attend=fail)
    code, found = small(implementations=(FLASH, other))
    assert code == 0
    assert [row["note"] for row in found] == ["", "RuntimeError: no kernel"]
    code, _ = small("--keep-going", implementations=(FLASH, replace(other, name="ours, failing")))
    assert code == 1


@interpreted
def test_items_without_time_are_named(small, capsys):
    code, found = small("--minutes", "0")
    assert code == 0
    assert found == []
    assert f"no time for {SMALL} ({FLASH.name}; {OURS.name})" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2
    assert "--cpu" in capsys.readouterr().err


def test_a_checking_process_that_dies_fails_its_open_checks(monkeypatch):
    done = checks.Checked(str(SMALL), FLASH.name, False, {})
    monkeypatch.setattr(checks, "run_process", lambda arguments: ([done], "the process ended with -11: "))
    found = checks.run_checks([checks.Job(SMALL, (OURS, FLASH))], [], 2)
    assert [verdict.passed for verdict in found] == [True, False]
    assert str(found[1]) == f"FAILED {SMALL} | {OURS.name}: the process ended with -11: "


@pytest.mark.parametrize("make", [plan.quick_plan, plan.full_plan, plan.tiny_plan])
def test_everything_timed_is_checked_first(make):
    items = make()
    judged = {(job.case, x.name) for job in plan.check_jobs(items, 512) for x in job.implementations}
    assert judged == {(item.case.at(512), x.name) for item in items if item.case for x in item.implementations}


def test_the_quick_plan_is_short():
    assert sum(len(item.passes) * len(item.implementations) for item in plan.quick_plan()) <= 21


@pytest.mark.parametrize("case", [SMALL, *MASKED], ids=str)
def test_work_counts_visible_keys_only(case):
    (x,) = draw(case, 1, CPU, torch.float32)
    seen = reference.visible(case.length, case.length, True, case.window)
    if x.ranges is not None:
        keys = torch.arange(case.length)
        seen = seen & (keys >= x.ranges[0, :, :1]) & (keys < x.ranges[0, :, 1:])
    whole = case.length if case.window is None else case.window  # the diagonal counts half
    assert case.pairs == int(seen.sum()) - whole / 2
    assert case.flop == 4 * case.pairs * case.heads * case.head_dim
    assert torch.equal(dense_mask(case, x)[0, 0] == 0, seen)


@pytest.mark.parametrize(
    ("implementation", "case"),
    [(x, SMALL) for x in HERE] + [(x, case) for x in HERE if x.mask is not nothing for case in MASKED],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_other_implementations_compute_the_same(implementation, case):
    (x,) = implementation.prepared(case, draw(case, 1, CPU, torch.float32))
    exact = oracle(case, exactly(x), implementation.normed, implementation.softcap)
    assert error(implementation.attend(case, x).detach(), exact.detach()) < 1e-6


def test_gains_reach_the_attention():
    (x,) = ARMS[0].prepared(SMALL, draw(SMALL, 1, CPU, torch.float32))
    assert 2.4 <= float(x.q_gain.detach().min()) <= float(x.q_gain.detach().max()) <= 3.6
    assert VARLEN.missing(SMALL, "cpu")


def test_a_failing_run_does_not_stop_the_others():
    def fail(n):
        raise torch.OutOfMemoryError("of 3 GiB")

    runs = {"good": Run(lambda n: None), "bad": Run(fail)}
    Clock(CPU).race(runs, 0.1)
    assert runs["bad"].failure == "out of memory"
    assert len(runs["good"].times) == len(runs["good"].host) == 2


def test_an_item_is_stopped_in_time():
    with pytest.raises(Late, match=r"stopped after 0 s"), limit(0.05):
        time.sleep(5)
    with limit(0.05):
        pass
    time.sleep(0.1)
