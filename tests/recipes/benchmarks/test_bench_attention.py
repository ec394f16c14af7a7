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
from bench_cases import Case, draw
from bench_implementations import ARMS, FLASH, GLUON, OURS, VARLEN
from bench_timing import Clock, Run

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
        assert not named.ours or named in GLUON.values()
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


@interpreted
def test_passing_implementations_are_timed_on_request(small, wrong):
    code, found = small("--keep-going")
    assert code == 1
    timed, failed = sorted(found, key=lambda row: row["what"])
    assert (timed["what"], failed["what"]) == (FLASH.name, OURS.name)
    assert float(timed["ms_median"]) > 0
    assert failed["note"] == "not timed: failed its check"


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


@interpreted
def test_an_absent_implementation_is_a_row(small):
    code, found = small(implementations=(FLASH, VARLEN))
    assert code == 0
    assert [row["note"] for row in found if row["what"] == VARLEN.name] == ["needs a GPU"]


@interpreted
def test_the_first_part_has_its_rows_before_the_next_one_is_checked(small):
    code, found = small(implementations=(FLASH, replace(OURS, attend=fail)), apart=True)
    assert code == 1
    assert [row["what"] for row in found] == [FLASH.name]


@interpreted
def test_an_implementation_without_a_verdict_is_not_timed(small, monkeypatch, tmp_path):
    judge = checks.check_job
    monkeypatch.setattr(checks, "check_job", lambda *job: (x for x in judge(*job) if x.what != FLASH.name))
    code, found = small()
    assert code == 0
    assert {row["what"]: row["note"] for row in found} == {
        FLASH.name: "not timed: no result of its check",
        OURS.name: "",
    }
    assert f"| {SMALL} | {OURS.name} | forward |" in (tmp_path / "attention_interpreter.md").read_text()


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
    monkeypatch.setattr(checks, "run_process", lambda *_: ([done], "the process ended with -11: "))
    found = checks.run_checks({3: checks.Job(SMALL, (OURS, FLASH))}, 0, [], 2)
    assert [verdict.passed for verdict in found] == [True, False]
    assert str(found[1]) == f"FAILED {SMALL} | {OURS.name}: the process ended with -11: "


@pytest.mark.parametrize(
    "part", [plan.quick_plan(), plan.gluon_plan(), *plan.full_plan(), *plan.tiny_plan()], ids=lambda part: str(part[0])
)
def test_everything_timed_is_checked_first(part):
    """Each part checks and compiles what it times."""
    jobs = plan.check_jobs(part, 512)
    judged = {(job.case, x.name) for job in jobs for x in job.implementations}
    assert judged == {(item.case.at(512), x.name) for item in part for x in item.implementations}
    timed = [pair for job in jobs for pair in zip(job.implementations, job.timed, strict=True)]
    compiled = {(case, x.name) for x, cases in timed for case in cases}
    assert compiled == {(item.case, x.name) for item in part for x in item.implementations}


def test_the_quick_plan_is_short():
    assert sum(len(item.passes) * len(item.implementations) for item in plan.quick_plan()) <= 21
    assert plan.full_plan()[0] == plan.quick_plan()


def test_what_is_checked_is_not_checked_again():
    (job,) = plan.check_jobs([plan.Item(SMALL, (OURS, FLASH))], 48)
    known = {(str(SMALL.at(48)), x.name) for x in (OURS, FLASH)}
    assert job.known(known)
    assert not job.known(known - {(str(SMALL.at(48)), FLASH.name)})
    (other,) = plan.check_jobs([plan.Item(SMALL, (replace(FLASH, compiled=True),))], 48)
    assert not other.known(known)


def test_full_size_is_compiled_in_the_checks_where_it_can_be():
    seen = []

    def attend(case, x):
        seen.append((case, x.q.requires_grad))
        return fail(case, x) if len(seen) == 2 else FLASH.attend(case, x)

    for _ in range(2):  # the second one fails, which is left to the timing process
        checks.compile_for(replace(FLASH, attend=attend), SMALL, CPU, torch.float32)
    assert seen == [(SMALL, True)] * 2


def test_the_first_checks_are_five_of_ours():
    jobs = plan.check_jobs(plan.first_plan(), 192)
    assert [len(job.implementations) for job in jobs] == [1] * 5
    assert all(x.ours for job in jobs for x in job.implementations)


def test_the_list_names_every_implementation(capsys):
    assert bench.main(["--list"]) == 0
    lines = capsys.readouterr().out
    named = (x for part in plan.full_plan() for item in part for x in item.implementations)
    assert all(f"  {x.name}: " in lines for x in named)


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
