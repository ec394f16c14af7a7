"""The script for a GPU, without one: its plan, the independence of its stages, and its output."""

from __future__ import annotations

import csv
import re
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, whose version the pages tell")
recipe, plans = (import_module(name) for name in ("device", "device_stages"))
ROOT = Path(__file__).parents[3]
BENCHMARKS = ("first checks", "benchmark", "benchmark, Gluon")


def stage(name: str, code: str, seconds: float = 200, **options: object) -> plans.Stage:
    return plans.Stage(name, plans.python("-c", code), seconds, **options)


def plan(out: Path = Path("out")) -> dict[str, plans.Stage]:
    return {stage.name: stage for stage in plans.full_plan(out, ("--commit", "abc"))}


def test_kernels_run_natively_and_the_gluon_kernel_only_on_request(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("HF_QKNORM_GLUON", "1")
    stages = plan()
    assert not any("TRITON_INTERPRET" in stage.environment for stage in stages.values())
    asking = {name for name, stage in stages.items() if "HF_QKNORM_GLUON" in stage.environment}
    assert asking == {"Gluon, memcheck", "Gluon, racecheck", "Gluon, checked"}


def test_numbers_come_after_the_smallest_checks():
    names = list(plan())
    assert names[:3] == ["first checks", "benchmark", "tests"]
    assert names.index("Gluon, checked") < names.index("benchmark, Gluon")


def test_every_file_of_the_plan_exists():
    stages = plan()
    assert set(plans.TESTS) <= set(stages["tests"].command)
    named = {x.partition("::")[0] for stage in stages.values() for x in stage.command}
    files = {x for x in named if x.startswith(("tests/", str(plans.HERE)))}
    assert len(files) == 10
    assert all((ROOT / file).exists() for file in files)
    assert stages["benchmark"].command[-2:] == ("--commit", "abc")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_benchmark_accepts_its_arguments_and_ends_in_time(name):
    stage, bench = plan()[name], import_module("bench_attention")
    args = bench.parse(list(stage.command[2:]))
    assert args.first or (args.keep_going and 60 * args.minutes < stage.seconds)


def test_the_plan_fits_into_nine_minutes():
    assert sum(stage.seconds for stage in plan().values()) <= 60 * 9


def test_the_memory_of_the_device_limits_the_large_tests(monkeypatch):
    assert plans.large_processes() >= 1
    device = type("device", (), {"total_memory": 150.7e9})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    assert plans.large_processes() == 2
    command = plan()["tests, large"].command
    assert command[command.index("--numprocesses") + 1] == "2"


def test_a_failing_stage_does_not_stop_the_next_ones(tmp_path):
    log = tmp_path / "log"
    late = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(900); print(7)'])"
    stages = [
        stage("good", "print('fine | really')"),
        stage("bad", "print('half'); raise SystemExit(3)"),
        stage("slow", f"print('started', flush=True); {late}", 3),
        stage("dependent", "print('no')", after="bad"),
        stage("independent", "print('yes')", after="good"),
        stage("bare", "print('no')", wrapper=("no-such-program",)),
    ]
    start = time.monotonic()
    found = plans.run_stages(stages, log, start + 400)  # less than their shares, so nothing is to spare
    assert [(x.outcome, x.detail) for x in found if x.stage != "slow"] == [
        ("passed", "fine | really"),
        ("failed", "half"),
        ("skipped", "'bad' did not pass"),
        ("passed", "yes"),
        ("skipped", "no no-such-program here"),
    ]
    assert found[2].outcome == "too long"
    assert time.monotonic() - start < 400
    text = log.read_text()
    assert "== slow, at most 3 s: " in text
    assert text.index("half") < text.index("started") < text.index("yes")


@pytest.mark.usefixtures("default_signals")  # restores what this test changes
def test_a_stage_that_is_late_is_interrupted_first(tmp_path):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background
    code = "import time\ntry: time.sleep(900)\nexcept KeyboardInterrupt: print('two failures')"
    outcome = plans.run_stage(stage("late", code), tmp_path / "log", 5)
    assert (outcome.outcome, outcome.detail) == ("too long", "two failures")
    assert outcome.seconds < 800


def test_time_that_a_stage_leaves_goes_to_the_next_one(tmp_path, monkeypatch):
    limits = []

    def record(stage, log, limit):
        limits.append(round(limit))
        clock[0] += taken[stage.name]
        return plans.Outcome(stage.name, "passed", taken[stage.name], limit, "")

    clock, taken = [0.0], {"a": 10.0, "b": 130.0, "c": 40.0}
    monkeypatch.setattr(plans, "run_stage", record)
    monkeypatch.setattr(plans.time, "monotonic", lambda: clock[0])
    stages = [
        stage("a", "", 50),
        stage("absent", "", 500, wrapper=("no-such-program",)),
        stage("b", "", 90),
        stage("c", "", 60),
    ]
    plans.run_stages(stages, tmp_path / "log", 200)
    assert limits == [50, 130, 60]  # the second gets the 40 s that the first left; the third keeps its share


def test_nothing_is_started_when_the_time_is_up(tmp_path):
    found = plans.run_stages([stage("late", "print(1)")], tmp_path / "log", time.monotonic() + 1)
    assert [(x.outcome, x.detail) for x in found] == [("skipped", "no time left")]
    assert not (tmp_path / "log").exists()


HEAD = "case,what,kind,ms_median,ratio,error,note\n"
ENVIRONMENT = {"card": "H200", "torch": "2.11", "commit": "abc", "date": "2026-01-01"}


def test_the_page_has_the_outcome_of_each_stage(tmp_path):
    outcomes = [plans.Outcome("benchmark", "too long", 12.34, 120, "3 failed | 9 passed")]
    page = recipe.write(tmp_path, outcomes, ENVIRONMENT, "python recipes/benchmarks/device.py")
    assert page == (tmp_path / "device.md").read_text()
    assert "H200: torch 2.11, commit abc, date 2026-01-01." in page
    assert "| benchmark | too long | 12 | 120 | 3 failed / 9 passed |" in page
    (row,) = csv.DictReader((tmp_path / "device.csv").open())
    assert (row["stage"], row["outcome"], row["seconds"], row["card"]) == ("benchmark", "too long", "12.3", "H200")


@pytest.mark.parametrize(
    ("times", "checked", "verdict"),
    [
        ((0.8, 0.9), "passed", "kept. It takes 0.85 of"),
        ((0.9, 0.9), "passed", "kept"),
        ((0.88, 0.94), "passed", "removed. It takes 0.91 of"),
        ((0.5, 0.5), "failed", r"removed \(its tests: failed\)"),
        ((0.5, 0.5), "too long", r"undecided \(its tests: too long\)"),
        ((), "passed", r"undecided \(no row"),
    ],
)
def test_the_rule_decides_on_the_gluon_kernel(times, checked, verdict, tmp_path):
    lines = [
        line
        for number, time in enumerate(times)
        for line in (f"T{number},ours: x,forward,1.0,,,\n", f"T{number},ours, Gluon: x,forward,{time},,,\n")
    ]
    (tmp_path / "gluon").mkdir()
    rows = HEAD + "".join(lines).replace("ours, Gluon: x", '"ours, Gluon: x"') + "T9,SDPA,forward,3.0,,,\n"
    (tmp_path / "gluon/attention_h200.csv").write_text(rows)
    page = recipe.write(tmp_path, [plans.Outcome("Gluon, checked", checked, 1, 1, "")], ENVIRONMENT, "")
    assert re.search(f"Gluon forward kernel: {verdict}", page)
    assert page.count("| ours, Gluon: x |") == len(times)


def test_each_gluon_row_has_a_plain_one():
    implementations = import_module("bench_implementations")
    for plain, gluon in implementations.GLUON.items():
        assert gluon.name.replace("ours, Gluon", "ours", 1) == plain.name
        assert gluon.softcap == plain.softcap


@pytest.mark.parametrize(
    ("outcome", "code"),
    [("passed", 0), ("failed", 1), ("too long", 1), ("no time left", 1), ("missing", 0)],
)
def test_the_exit_code_says_whether_something_failed(outcome, code, tmp_path, monkeypatch):
    found = plans.Outcome("tests", outcome, 1, 1, outcome)
    monkeypatch.setattr(recipe, "run_stages", lambda *_: [found])
    assert recipe.main(["--dry-run", "--out", str(tmp_path)]) == code


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_starts(tmp_path, capsys):
    assert recipe.main(["--out", str(tmp_path / "out")]) == 2
    assert "needs a Hopper GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_stage_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        recipe.main(["--dry-run", "--out", str(tmp_path / "out"), "--only", "benchmark", "bench"])
    assert "no stage is named bench; there are first checks, " in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_reads_every_command_line(tmp_path):
    assert recipe.main(["--dry-run", "--out", str(tmp_path), "--commit", "abc"]) == 0
    rows = list(csv.DictReader((tmp_path / "device.csv").open()))
    assert [row["stage"] for row in rows] == list(plan())
    assert {row["outcome"] for row in rows} == {"passed"}
    assert {row["commit"] for row in rows} == {"abc"}
    log = (tmp_path / "device.log").read_text()
    assert sys.executable in log
