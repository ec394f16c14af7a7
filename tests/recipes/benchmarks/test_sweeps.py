"""The sweeps and the table of costs, from end to end, each at its smallest size: their logs and their verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arms
import cost
import lp
import pytest
import stability
import torch
from run_log import Runs, thinned
from stability_table import MARGIN, Sweep, diverged, largest_stable, rate_cell
from sweep import FOLDS, Characters, Size, train

from hf_qknorm import QKClip
from hf_qknorm.demo.training import decay_groups
from hf_qknorm.model.attention import patched_layers

NAN, INF = math.nan, math.inf


def result(held_out: float, *losses: float) -> dict[str, Any]:
    return {"losses": [*(losses or (4.0, 3.0)), held_out], "held_out": held_out, "logits": [[0, 1.0], [6, 2.0]]}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# The rules that runs are judged by


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (result(2.0), False),
        (result(2.29), False),
        (result(2.31), True),
        (result(2.0, 4.0, 9.0), False),  # a spike that was overcome
        (result(NAN), True),
        (result(INF), True),
        (result(2.0, 4.0, NAN), True),
    ],
)
def test_a_run_has_diverged_by_the_rule_that_the_recipe_states(run, expected):
    assert diverged(run, best=2.0) is expected
    assert f"{MARGIN:g} nats above" in stability.__doc__


@pytest.mark.parametrize(
    ("unstable", "expected"), [((), 3.0), ((3.0,), 2.0), ((2.0,), 1.0), ((1.0,), None), ((1.0, 2.0, 3.0), None)]
)
def test_a_rate_is_stable_if_no_smaller_one_is_not(unstable, expected):
    assert largest_stable([1.0, 2.0, 3.0], lambda rate: rate in unstable) == expected


def test_a_rate_is_stable_if_no_seed_diverged_beside_the_baselines_best():
    good, bad = result(2.1), result(2.45)
    results = {
        "baseline": {1e-3: [result(2.1), result(2.0)], 2e-3: [good, bad], 4e-3: [result(NAN), good]},
        "qk_norm": {1e-3: [result(1.0), result(1.0)], 2e-3: [good, good], 4e-3: [good, bad]},
    }
    found = Sweep(results, [1e-3, 2e-3, 4e-3])
    assert found.best == pytest.approx(2.05)  # not 1.0, which another arm reached
    assert (found.stable("baseline"), found.stable("qk_norm")) == (1e-3, 2e-3)
    assert [found.broken("baseline", rate) for rate in found.rates] == [0, 1, 1]
    assert found.stable("qk_norm", margin=0.5) == 4e-3
    assert math.isnan(found.mean("baseline", 4e-3))


@pytest.mark.parametrize(
    ("rate", "baseline", "expected"),
    [(4e-2, 6e-3, "0.04 (×6.67)"), (8e-2, 1e-2, "≥ 0.08 (≥ ×8)"), (4e-2, None, "0.04"), (None, 6e-3, "–")],
)
def test_a_rate_is_formatted_with_its_ratio_to_the_baseline(rate, baseline, expected):
    assert rate_cell(rate, baseline, top=8e-2) == expected


# The sweeps: all arms, and what was run is not run again


def sweep_stability(text: str, folder: Path, *more: str) -> Sweep:
    command = ["--size", "quick", "--text", text, "--rates", "0.01", "0.03", "--seeds", "1"]
    return stability.main([*command, "--out", str(folder / "stability"), *more])


def sweep_stability_in_part(text: str, folder: Path) -> stability.Sweep:
    return sweep_stability(text, folder, "--arms", "baseline", "qk_norm")


def sweep_lp(text: str, folder: Path) -> Any:
    return lp.main(["--size", "quick", "--text", text, "--folds", "2", "--out", str(folder / "lp")])


def test_the_stability_page_has_every_arm_and_the_paper(text, tmp_path):
    found = sweep_stability(text, tmp_path)
    assert set(found.results) == set(arms.ARMS)
    page = (tmp_path / "stability.md").read_text()
    for arm in arms.ARMS:
        assert f"\n| {arm} |" in page
    assert "0.06 (×10)" in page
    assert "0.04 (×6.67)" in page
    for name in ("stability-loss.png", "stability-logits.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    kept = rows(tmp_path / "stability.jsonl")
    assert len(kept) == 2 * len(arms.ARMS)
    assert all(row["made"]["torch"] == torch.__version__ and row["made"]["commit"] for row in kept)


@pytest.mark.parametrize(("recipe", "sweep"), [(stability, sweep_stability_in_part), (lp, sweep_lp)])
def test_a_sweep_continues_where_it_stopped(recipe, sweep, text, tmp_path, monkeypatch):
    first = sweep(text, tmp_path)
    path = tmp_path / f"{recipe.__name__}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:20])  # killed while it wrote
    ran: list[Any] = []
    run_one: Callable[..., Any] = recipe.run_one
    monkeypatch.setattr(recipe, "run_one", lambda *given: ran.append(given) or run_one(*given))
    second = sweep(text, tmp_path)
    assert len(ran) == 1
    for row, line in zip(rows(path), lines, strict=True):  # and the run that was done again gave the same
        assert (row["settings"], row["result"]) == tuple(json.loads(line)[key] for key in ("settings", "result"))
    assert json.dumps(str(first)) == json.dumps(str(second))


def test_unknown_arms_are_refused(text, tmp_path):
    with pytest.raises(ValueError, match="expected some of baseline, soft_cap"):
        sweep_stability(text, tmp_path, "--arms", "qknorm")


def test_other_settings_are_other_runs(tmp_path):
    runs = Runs(tmp_path / "runs.jsonl")
    assert runs.get({"rate": 1}, lambda: {"loss": 1}) == {"loss": 1}
    assert runs.get({"rate": 2}, lambda: {"loss": 2}) == {"loss": 2}
    assert Runs(tmp_path / "runs.jsonl").get({"rate": 1}, lambda: {"loss": 3}) == {"loss": 1}


def test_lp_trains_each_order_from_every_gain(text, tmp_path):
    results = sweep_lp(text, tmp_path)
    assert set(results) == {(p, fresh) for p in lp.ORDERS for fresh in lp.FRESH}
    assert results[2.0, "fixed"] == results[2.0, "rescaled"]
    size = lp.SIZES["quick"][0]
    for fresh, start in (("fixed", lp.fixed_gain(size)), ("one", 1.0)):
        for gain in [gain for p in (1.0, 4.0) for run in results[p, fresh] for gain in run["gains"]]:
            assert gain == pytest.approx(start, abs=0.2)  # few steps on, all are near where they started
    assert results[1.0, "rescaled"][0]["gains"][0] > 2 * lp.fixed_gain(size)
    assert (tmp_path / "lp.png").read_bytes().startswith(b"\x89PNG")


def test_orders_are_compared_within_a_fold():
    mean, error = lp.against([result(2.0), result(3.0)], [result(2.1), result(3.3)])
    assert (mean, error) == (pytest.approx(-0.2), pytest.approx(0.1))


# What QuacK and QK-Clip do in the arms


@pytest.mark.parametrize(("arm", "same"), [("QuacK", False), ("QK-clip", True)])
def test_the_arms_differ_from_the_baseline_where_they_should(arm, same, text):
    size, characters = stability.SIZES["quick"], Characters(text)
    runs = [stability.run_one(arms.ARMS[name], size, characters, 0.05, 0, "cpu") for name in ("baseline", arm)]
    assert (runs[0] == runs[1]) is same  # no logit of these passes 100


def test_the_arm_of_qk_clip_clips(text, monkeypatch):
    monkeypatch.setattr(arms, "QKClip", lambda model: QKClip(model, threshold=1e-3))
    size, characters = stability.SIZES["quick"], Characters(text)
    run = stability.run_one(arms.ARMS["QK-clip"], size, characters, 0.05, 0, "cpu")
    free = stability.run_one(arms.ARMS["baseline"], size, characters, 0.05, 0, "cpu")
    assert run["logits"][-1][1] < 0.1 * free["logits"][-1][1]


# What they stand on


def test_each_tenth_is_held_out_once(text):
    folds = [Characters(text, fold) for fold in range(FOLDS)]
    whole = torch.cat([fold.held_out for fold in folds])
    assert torch.equal(whole[len(folds[0].held_out) :], folds[0].seen)
    assert all(len(fold.seen) + len(fold.held_out) == len(whole) for fold in folds)


def test_rates_warm_up_and_end_at_the_floor(text):
    size, characters = Size(1, 2, 16, 16, 2, steps=10), Characters(text)
    model = size.build(characters.vocabulary, "none")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    train(model, characters.training(size, 0), optimizer, warmup=4, floor=0.1)
    assert rates[:2] == pytest.approx([0.25, 0.5], rel=0.05)
    assert max(rates) == rates[3]
    assert rates[-1] == pytest.approx(0.1, abs=0.03)


def test_a_loss_that_is_not_finite_ends_a_run(text):
    size, characters = Size(1, 2, 16, 16, 2, steps=10), Characters(text)
    model = size.build(characters.vocabulary, "none")
    optimizer = torch.optim.SGD(model.parameters(), lr=INF)
    losses = train(model, characters.training(size, 0), optimizer)
    assert len(losses) == 2
    assert not math.isfinite(losses[-1])
    assert math.isnan(thinned([1.0, 2.0, NAN, 3.0], 2)[1])


def test_gains_have_no_weight_decay():
    model = Size(1, 2, 16, 16, 2, steps=1).build(10, "qk_norm")
    (matrices, others) = decay_groups(model, 0.1)
    gains = {id(p) for layer in patched_layers(model).values() for p in layer.q_norm.parameters()}
    assert gains <= {id(p) for p in others["params"]}
    assert others["weight_decay"] == 0
    assert len(matrices["params"]) + len(others["params"]) == len(list(model.parameters()))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured on Linux only")
def test_the_cost_page_has_every_scheme(tmp_path):
    times = cost.main(["--size", "quick", "--turns", "3", "--out", str(tmp_path / "cost.md")])
    assert set(times) == set(cost.ARMS)
    assert all(len(runs) == 3 for runs in times.values())
    page = (tmp_path / "cost.md").read_text()
    assert "| baseline | " in page
    assert page.count("\n| ") == len(cost.ARMS) + 1
    assert cost.ratio([2.0, 2.0, 8.0], [1.0, 1.0, 2.0]).startswith("2.00 ")
