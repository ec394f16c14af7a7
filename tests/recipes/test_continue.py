"""The comparison of continued training, at its smallest size: its arms, faults and tables, and a run in pieces."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import continued_run
import pytest
from continued_arms import ARMS, STARTS, Start
from continued_page import Grid, conclusions, rates_section
from continued_plots import STYLES
from continued_run import SIZES, Sources, prepare, run_one

SIZE = SIZES["quick"]


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    """The script, whose name is a keyword."""
    path = Path(continued_run.__file__).parents[1] / "continue.py"
    spec = importlib.util.spec_from_file_location("continue_recipe", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sources(text, tmp_path_factory) -> Sources:
    """A model that was trained for a moment, with all starts; such a model needs no knee, but these tests do."""
    found = Sources(None, text, text, tmp_path_factory.mktemp("work"))
    with pytest.MonkeyPatch.context() as patch:
        for name, scheme in (("knee", "qk_norm_cap"), ("norms", "qk_norm")):
            patch.setitem(STARTS, name, Start(scheme, {"method": "moments", "knee": 4.0}))
        assert prepare(found, SIZE, set(STARTS))
    return found


def settings(arm: str, **changed: Any) -> dict[str, Any]:
    given = {"arm": arm, "rate": 1e-2, "seed": 0, "fault": "none", "precision": "fp32", "size": asdict(SIZE)}
    return given | changed


@pytest.mark.slow
def test_the_recipe_writes_every_arm_fault_and_precision(recipe, text, tmp_path, capsys):
    arms = ["unpatched", "qk_norm_cap, knee lowered", "QuacK"]
    command = ["--size", "quick", "--known", text, "--text", text, "--rates", "1e-3", "3e-3", "1e-2", "--seeds", "2"]
    command += ["--jobs", "1", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--arms", *arms]
    recipe.main([*command, "--minutes", "0"])
    assert "Time is up" in capsys.readouterr().out
    recipe.main(command)
    page = (tmp_path / "out.md").read_text()
    assert page.split("```")[1].strip().splitlines()[-2:] == [
        "    --seeds 2 \\",
        "    --arms unpatched 'qk_norm_cap, knee lowered' QuacK",
    ]
    tables = page[page.index("Held-out loss in nats") :]
    assert all(tables.count(f"\n| {arm} |") >= 3 for arm in arms)
    for words in ("came back", "in fp32 (1 seed)", "QuacK's τ", "a trigram table"):
        assert words in page
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * 1 + 3 * 3 * 2 + 2 * 2 * 2 + 2 * 3  # τ; arms, rates, seeds; arms, faults, seeds; fp32
    for name in ("out.png", "out-steps.png", "out-front.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    recipe.main(command)  # all is done: the same page
    assert (tmp_path / "out.md").read_text() == page


def test_runs_whose_loss_jumped_are_counted():
    losses = [5.9, 6.1, math.nan]
    runs = [{"way": [[0, 4.0, 9.0, 0.1], [1, loss, 9.0, 0.1]], "losses": [4.0], "held_out": 3.0} for loss in losses]
    assert "- Runs at 0.001 whose loss jumped by more than 2 nats in a look: unpatched 2 of 3." in conclusions(
        {"unpatched": Grid({1e-3: runs})}
    )


def test_arms_with_muon_are_held_against_muon_too():
    def grid(*ends: float) -> Grid:
        way = [[0, 4.0, 9.0, 0.1], [1, 3.0, 9.0, 0.1]]
        return Grid({1e-3: [{"way": way, "losses": [4.0], "held_out": end} for end in ends]})

    arms = {"unpatched": grid(3.0, 3.2), "Muon": grid(2.5, 2.6), "Muon, knee": grid(2.6, 2.9)}
    tables = "\n".join(rates_section(arms))
    assert tables.count("| Muon, knee | -0.350 ± 0.050 |") == 1
    assert "with Muon at the same rate:\n\n| arm | 0.001 |\n|---|---:|\n| Muon, knee | +0.200 ± 0.100 |\n\n" in tables


def test_every_arm_has_a_style():
    assert STYLES.keys() == ARMS.keys()


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains_and_ends_as_it_should(arm, sources):
    run = run_one(settings(arm), sources)
    assert math.isfinite(run["held_out"])
    assert [look[0] for look in run["way"]] == [0, 2, 4, 6]
    assert run["way"][0][1] > run["held_out"]


@pytest.mark.parametrize(
    "arm",
    ["unpatched", "qk_norm_cap, knee lowered", "qk_norm, opened and removed", "QK-Clip 30", "Muon, QK-Clip 100",
     "Muon, knee lowered", "QuacK"],
)  # fmt: skip
@pytest.mark.parametrize("pause", [1, 4])
def test_a_run_in_pieces_is_the_same_run(arm, pause, sources, monkeypatch):
    whole = run_one(settings(arm), sources)
    times = iter([0.0] * pause + [2.0])
    monkeypatch.setattr(continued_run.time, "monotonic", lambda: next(times))
    assert run_one(settings(arm), sources, end=1.0) is None
    monkeypatch.undo()
    assert run_one(settings(arm), sources) == whole
    assert not list(sources.folder.glob("*.pt"))


def test_a_fault_changes_the_run_from_its_half_on(sources):
    whole, *faulty = (run_one(settings("unpatched", fault=fault), sources) for fault in ("none", "noise", "rate"))
    for run in faulty:
        seen = {look[0]: look for look in run["way"]}
        assert all(seen[look[0]] == look for look in whole["way"] if look[0] <= SIZE.steps // 2)
        assert run["held_out"] != whole["held_out"]
