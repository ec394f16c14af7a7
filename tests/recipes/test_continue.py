"""The comparison of continued training, at its smallest size: its arms, faults and tables, and a run in pieces."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import continued_run
import pytest
import torch
from continued_arms import ARMS, STARTS, Start
from continued_page import Grid, conclusions, fall, largest_logit, rates_section
from continued_run import AFTER, DOUBLED, SIZES, Run, Sources, prepare, run_one

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


def row(*losses: float, logit: float = 1.0) -> dict[str, Any]:
    way = [[step, loss, logit * step, 0.5] for step, loss in enumerate(losses)]
    return {"way": way, "losses": list(losses), "held_out": losses[-1]}


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


def test_arms_without_the_model_to_compare_with_are_refused(recipe):
    with pytest.raises(ValueError, match="expected unpatched"):
        recipe.main(["--arms", "soft_cap"])
    with pytest.raises(ValueError, match="expected some of unpatched"):
        recipe.main(["--arms", "unpatched", "cap"])


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


def test_the_knee_ends_at_the_plain_scheme(sources):
    kept, lowered = (run_one(settings(arm), sources) for arm in ("qk_norm_cap, knee", "qk_norm_cap, knee lowered"))
    assert kept["way"][0] == lowered["way"][0]
    assert kept["held_out"] != lowered["held_out"]


def test_a_fault_changes_the_run_from_its_half_on(sources):
    whole, *faulty = (run_one(settings("unpatched", fault=fault), sources) for fault in ("none", "noise", "rate"))
    for run in faulty:
        seen = {look[0]: look for look in run["way"]}
        assert all(seen[look[0]] == look for look in whole["way"] if look[0] <= SIZE.steps // 2)
        assert run["held_out"] != whole["held_out"]


def test_rates_warm_up_fall_and_double_at_the_fault():
    size = SIZES["cpu"]
    plain, faulty = (Run(None, None, ARMS["unpatched"], 1.0, size, "fp32", fault, {}) for fault in ("none", "rate"))
    factors = [plain.factor(step) for step in range(size.steps)]
    assert factors[0] == pytest.approx(1 / size.warmup)
    assert max(factors) == pytest.approx(1, abs=0.03)
    assert factors[-1] == pytest.approx(0.1, abs=0.01)
    doubled = [step for step in range(size.steps) if faulty.factor(step) == pytest.approx(2 * factors[step])]
    assert doubled == [size.steps // 2 + i for i in range(DOUBLED)]


def test_tables_and_conclusions_bear_runs_that_diverged():
    base = Grid({1e-3: [row(3.0, 2.0), row(3.0, 2.1)], 1e-2: [row(3.0, math.nan), row(3.0, 2.6)]})
    lost = Grid({rate: [row(3.0, math.nan), row(3.0, math.nan)] for rate in (1e-3, 1e-2)})
    arms = {"unpatched": base, "lost": lost}
    lines = conclusions(arms)
    assert "- Diverged at every rate, or compared with a model that did: lost." in lines
    assert all("lost" not in line for line in lines[:3])
    assert any(line.startswith("| unpatched | 2.050 ± 0.071 | nan |") for line in rates_section(arms))


def test_a_fall_counts_from_the_fault_on():
    run = row(9.0, 2.0, 3.0, 2.5, 2.0)
    assert fall(run, half=1, after=AFTER) == pytest.approx(1.0)
    assert fall(run, half=2, after=AFTER) == pytest.approx(-0.5)
    assert largest_logit(run) == 4.0


def test_the_conclusions_name_each_arm_once_a_rule():
    base = Grid({1e-3: [row(3.0, 2.0), row(3.0, 2.1)], 1e-2: [row(3.0, 2.5), row(3.0, 2.6)]})
    good = Grid({1e-3: [row(3.0, 2.2), row(3.0, 2.3)], 1e-2: [row(3.0, 1.8), row(3.0, 1.9)]})
    lines = conclusions({"unpatched": base, "capped": good})
    assert "capped (-0.200" in lines[0]
    assert "none" in lines[1]
    assert "none" in lines[2]
    assert lines[-3].endswith("capped; unpatched.")


def test_a_work_folder_of_another_size_is_refused(sources):
    with pytest.raises(ValueError, match="another folder by --work"):
        prepare(sources, replace(SIZE, width=128), {"unpatched"})


def test_the_base_is_the_checkpoint_where_one_is_given(sources, text, tmp_path):
    given = Sources(str(sources.folder / "unpatched"), text, text, tmp_path)
    assert prepare(given, SIZE, {"unpatched"})
    weights = [continued_run.load(folder / "unpatched").state_dict() for folder in (given.folder, sources.folder)]
    assert all(torch.equal(a, b) for a, b in zip(*(x.values() for x in weights), strict=True))


def test_a_rate_is_within_a_margin_if_all_from_the_best_one_up_to_it_are():
    found = Grid(
        {
            1e-3: [row(4.0, 3.0), row(4.0, 3.0)],  # slow, and no sign of divergence
            2e-3: [row(4.0, 2.0), row(4.0, 2.1)],
            4e-3: [row(4.0, 2.1), row(4.0, 2.45)],
            8e-3: [row(4.0, math.nan), row(4.0, 2.0)],
        }
    )
    assert found.best == (pytest.approx(2.05), 2e-3)
    assert [found.stable(found.best[0] + margin) for margin in (0.0, 0.1, 0.5)] == [None, 2e-3, 4e-3]
    assert found.sensitivities() == pytest.approx(
        [(3.0 + 2.0 + 2.1 + 4.0) / 4 - 2.0, (3.0 + 2.1 + 2.45 + 2.0) / 4 - 2.0]
    )
