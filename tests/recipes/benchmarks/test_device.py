"""The script for a GPU, without one: its plan, the independence of its stages, and its exit status."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton, which the benchmarks import")
device = import_module("device")


def stage(name: str, code: str, seconds: float = 200) -> device.Stage:
    return device.Stage(name, seconds, device.python("-c", code), dry=())


def test_every_file_of_the_plan_exists_and_all_limits_fit():
    stages = device.plan(Path("out"))
    named = {part.partition("::")[0] for stage in stages for part in stage.command}
    files = {part for part in named if part.startswith(("tests/", str(device.HERE)))}
    assert len(files) == 10
    assert all((device.ROOT / file).exists() for file in files)
    assert sum(stage.seconds for stage in stages) < 9 * 60


@pytest.mark.usefixtures("default_signals")
def test_a_failing_stage_does_not_stop_the_next_ones(tmp_path, monkeypatch):
    late = "import time\nprint('started', flush=True)\ntry: time.sleep(900)\nexcept KeyboardInterrupt: print('two')"
    stages = [
        stage("good", "print('fine | really')"),
        stage("bad", "print('half'); raise SystemExit(3)"),
        stage("late", late, 4),
        replace(stage("bare", ""), command=("no-such-program",)),
        stage("next", "print('yes')"),
    ]
    monkeypatch.setattr(device, "plan", lambda out: stages)
    monkeypatch.setattr(device, "LEAST", 1.0)
    assert device.main(["--dry-run", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "device.md").read_text()
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert [(row[0], row[1], row[4]) for row in cells] == [
        ("good", "passed", "fine / really"),
        ("bad", "failed", "half"),
        ("late", "too long", "two"),
        ("bare", "skipped", "no no-such-program here"),
        ("next", "passed", "yes"),
    ]
    text = (tmp_path / "device.log").read_text()
    assert text.index("half") < text.index("== late, at most 4 s: ") < text.index("started") < text.index("yes")


@pytest.mark.slow
def test_a_dry_run_reads_command_lines(tmp_path):
    assert device.main(["--dry-run", "--out", str(tmp_path), "--only", "attention", "training step"]) == 0
    assert (tmp_path / "device.md").read_text().count(" | passed | ") == 2
