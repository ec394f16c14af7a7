"""The script for a GPU, without one: its plan, the independence of its stages, and its output."""

from __future__ import annotations

import csv
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton, whose version the pages tell")
recipe, plans = (import_module(name) for name in ("device", "device_stages"))
ROOT = Path(__file__).parents[3]
BENCHMARKS = ("first checks", "benchmark")


def stage(name: str, code: str, seconds: float = 200, **options: object) -> plans.Stage:
    return plans.Stage(name, plans.python("-c", code), seconds, **options)


def plan(out: Path = Path("out")) -> dict[str, plans.Stage]:
    return {stage.name: stage for stage in plans.full_plan(out, ("--commit", "abc"))}


def test_every_file_of_the_plan_exists():
    stages = plan()
    assert set(plans.TESTS) <= set(stages["tests"].command)
    named = {x.partition("::")[0] for stage in stages.values() for x in stage.command}
    files = {x for x in named if x.startswith(("tests/", str(plans.HERE)))}
    assert len(files) == 9
    assert all((ROOT / file).exists() for file in files)
    assert stages["benchmark"].command[-2:] == ("--commit", "abc")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_benchmark_accepts_its_arguments_and_ends_in_time(name):
    stage, bench = plan()[name], import_module("bench_attention")
    args = bench.parse(list(stage.command[2:]))
    assert args.first or (args.keep_going and 60 * args.minutes < stage.seconds)


def test_a_failing_stage_does_not_stop_the_next_ones(tmp_path):
    log = tmp_path / "log"
    late = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(900); print(7)'])"
    stages = [
        stage("good", "print('fine | really')"),
        stage("bad", "print('half'); raise SystemExit(3)"),
        stage("slow", f"print('started', flush=True); {late}", 3),
        stage("next", "print('yes')"),
        stage("bare", "print('no')", wrapper=("no-such-program",)),
    ]
    start = time.monotonic()
    found = plans.run_stages(stages, log, start + 200)  # less than their shares, so nothing is to spare
    assert [(x.outcome, x.detail) for x in found if x.stage != "slow"] == [
        ("passed", "fine | really"),
        ("failed", "half"),
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
    ("outcome", "code"),
    [("passed", 0), ("failed", 1), ("too long", 1), ("no time left", 1), ("missing", 0)],
)
def test_the_exit_code_says_whether_something_failed(outcome, code, tmp_path, monkeypatch):
    found = plans.Outcome("tests", outcome, 1, 1, outcome)
    monkeypatch.setattr(recipe, "run_stages", lambda *_: [found])
    assert recipe.main(["--dry-run", "--out", str(tmp_path)]) == code


@pytest.mark.slow
def test_a_dry_run_reads_every_command_line(tmp_path):
    assert recipe.main(["--dry-run", "--out", str(tmp_path), "--commit", "abc"]) == 0
    rows = list(csv.DictReader((tmp_path / "device.csv").open()))
    assert [row["stage"] for row in rows] == list(plan())
    assert {row["outcome"] for row in rows} == {"passed"}
    assert {row["commit"] for row in rows} == {"abc"}
    log = (tmp_path / "device.log").read_text()
    assert sys.executable in log
