"""The script for a GPU, without one: its plan, the independence of its stages, and its output."""

from __future__ import annotations

import csv
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, whose version the pages tell")
recipe = import_module("device")
ROOT = Path(__file__).parents[3]


def stage(name: str, code: str, seconds: float = 30, **options: object) -> recipe.Stage:
    return recipe.Stage(name, recipe.python("-c", code), seconds, **options)


def plan(out: Path = Path("out")) -> dict[str, recipe.Stage]:
    return {stage.name: stage for stage in recipe.full_plan(out, ("--commit", "abc"), None)}


def test_kernels_run_natively_and_the_gluon_kernel_only_on_request(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("HF_QKNORM_GLUON", "1")
    stages = plan()
    assert not any("TRITON_INTERPRET" in stage.environment for stage in stages.values())
    asking = {name for name, stage in stages.items() if "HF_QKNORM_GLUON" in stage.environment}
    assert asking == {"Gluon, memcheck", "Gluon, racecheck", "Gluon, tests", "benchmark, Gluon"}


def test_every_file_of_the_plan_exists():
    stages = plan()
    for name, tests in (("tests", recipe.TESTS), ("tests, on the card", recipe.ON_CARD)):
        assert all((ROOT / test).exists() for test in tests)
        assert stages[name].command[-len(tests) :] == tests
    assert stages["Gluon, tests"].command[-1].startswith(recipe.TESTS[0])
    assert (ROOT / stages["Gluon, tests"].command[-1]).is_file()
    scripts = [x for stage in stages.values() for x in stage.command if x.startswith(str(recipe.HERE))]
    assert len(scripts) == 5
    assert all(Path(script).is_file() for script in scripts)
    assert "--small" in stages["Gluon, racecheck"].command
    assert stages["benchmark"].command[-2:] == ("--commit", "abc")


def test_the_benchmark_accepts_its_arguments():
    bench = import_module("bench_attention")
    for name in ("benchmark", "benchmark, Gluon"):
        command = plan()[name].command
        args = bench.parse(list(command[command.index(str(recipe.HERE / "bench_attention.py")) + 1 :]))
        assert args.keep_going
        assert 60 * args.minutes < plan()[name].seconds


def test_the_plan_fits_into_nine_minutes():
    assert sum(stage.seconds for stage in plan().values() if stage.name != "prototypes") <= 60 * 9


def test_prototypes_run_from_the_given_folder(tmp_path):
    assert plan()["prototypes"].missing == "no folder of prototypes"
    (tmp_path / "gpu_smoke.py").touch()
    last = recipe.full_plan(Path("out"), (), tmp_path)[-1]
    assert (last.name, last.missing, last.command[-1]) == ("prototypes", "", str(tmp_path / "gpu_smoke.py"))


def test_a_failing_stage_does_not_stop_the_next_ones(tmp_path):
    log = tmp_path / "log"
    late = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60); print(7)'])"
    stages = [
        stage("good", "print('fine | really')"),
        stage("bad", "print('half'); raise SystemExit(3)"),
        stage("slow", f"print('started', flush=True); {late}", 3),
        stage("dependent", "print('no')", after="bad"),
        stage("independent", "print('yes')", after="good"),
        stage("absent", "print('no')", missing="not here"),
    ]
    start = time.monotonic()
    found = recipe.run_stages(stages, log, start + 60)
    assert [(x.outcome, x.detail) for x in found] == [
        ("passed", "fine | really"),
        ("failed", "half"),
        ("too long", "started"),
        ("skipped", "'bad' did not pass"),
        ("passed", "yes"),
        ("skipped", "not here"),
    ]
    assert time.monotonic() - start < 40
    text = log.read_text()
    assert "== slow, at most 3 s: " in text
    assert text.index("half") < text.index("started") < text.index("yes")


def test_nothing_is_started_when_the_time_is_up(tmp_path):
    found = recipe.run_stages([stage("late", "print(1)")], tmp_path / "log", time.monotonic() + 1)
    assert [(x.outcome, x.detail) for x in found] == [("skipped", "no time left")]
    assert not (tmp_path / "log").exists()


def test_the_page_compares_the_gluon_kernel_with_the_plain_one(tmp_path):
    head = "case,what,kind,ms_median\n"
    (tmp_path / "gluon").mkdir()
    (tmp_path / "attention_h200.csv").write_text(head + "T1,ours,forward,2.0\nT1,SDPA,forward,3.0\nT2,ours,forward,\n")
    (tmp_path / "gluon/attention_h200.csv").write_text(head + "T1,ours,forward,1.5\nT3,ours,forward,1.0\n")
    environment = {"card": "H200", "torch": "2.11", "commit": "abc", "date": "2026-01-01"}
    outcomes = [recipe.Outcome("tests", "failed", 12.34, 120, "3 failed | 9 passed")]
    page = recipe.write(tmp_path, outcomes, environment, "python recipes/benchmarks/device.py")
    assert page == (tmp_path / "device.md").read_text()
    assert "H200: torch 2.11, commit abc, date 2026-01-01." in page
    assert "| tests | failed | 12 | 120 | 3 failed / 9 passed |" in page
    assert "| T1 | ours | forward | 2.0000 | 1.5000 | 0.75 |" in page
    assert "T2" not in page
    assert "T3" not in page
    (row,) = csv.DictReader((tmp_path / "device.csv").open())
    assert (row["stage"], row["outcome"], row["seconds"], row["card"]) == ("tests", "failed", "12.3", "H200")


@pytest.mark.parametrize(
    ("outcome", "code"),
    [("passed", 0), ("failed", 1), ("too long", 1), ("no time left", 1), ("missing", 0)],
)
def test_the_exit_code_says_whether_something_failed(outcome, code, tmp_path, monkeypatch):
    found = recipe.Outcome("tests", outcome, 1, 1, outcome)
    monkeypatch.setattr(recipe, "run_stages", lambda *_: [found])
    assert recipe.main(["--dry-run", "--out", str(tmp_path)]) == code


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_starts(tmp_path, capsys):
    assert recipe.main(["--out", str(tmp_path / "out")]) == 2
    assert "needs a Hopper GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_passes_every_stage_that_needs_no_gpu(tmp_path):
    assert recipe.main(["--dry-run", "--out", str(tmp_path), "--commit", "abc"]) == 0
    rows = list(csv.DictReader((tmp_path / "device.csv").open()))
    assert [row["stage"] for row in rows] == list(plan())
    outcomes = {row["stage"]: row["outcome"] for row in rows}
    assert [name for name, outcome in outcomes.items() if outcome == "passed"] == [
        "tests",
        "Gluon, checked",
        "Gluon, tests",
        "benchmark",
    ]
    assert {row["commit"] for row in rows} == {"abc"}
    assert "1 cases, 0 failures" in (tmp_path / "device.log").read_text()
    assert sys.executable in (tmp_path / "device.log").read_text()
