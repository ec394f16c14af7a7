"""The rules and the page of the sweep of learning rates, on made-up losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import stability
from observations import COLUMNS
from stability_page import between, factor_cell, mean_cell, rate_cell
from stability_table import MARGINS, Sweep, diverged, largest_stable
from stability_verdicts import verdicts

NAN, INF = math.nan, math.inf
BIGRAM, TRIGRAM = 3.0, 2.2


def result(held_out: float, *losses: float) -> dict[str, Any]:
    seen = {name: [1.0, 2.0] for name in COLUMNS} | {"step": [0, 3]}
    return {"losses": [*(losses or (4.0, 3.0)), held_out], "held_out": held_out, "initial": 4.0, "seen": seen}


def sweep_of(results: dict[str, dict[float, list[float]]]) -> Sweep:
    """A sweep of runs with these held-out losses, through the rows of a log."""
    log = [
        {"settings": {"arm": arm, "rate": rate, "seed": seed}, "result": result(loss)}
        for arm, by_rate in results.items()
        for rate, losses in by_rate.items()
        for seed, loss in enumerate(losses)
    ]
    return Sweep.of(log, list(results), (1e-3, 2e-3, 4e-3), (BIGRAM, TRIGRAM))


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
def test_a_run_has_diverged_above_the_limit(run, expected):
    assert diverged(run, BIGRAM, limit=2.3) is expected


def test_a_run_above_the_bigram_has_diverged_whatever_the_limit():
    assert diverged(result(3.01), BIGRAM)
    assert diverged(result(3.01), BIGRAM, limit=3.5)
    assert not diverged(result(2.99), BIGRAM)


def test_the_recipe_states_the_margins_before_its_runs():
    assert "0.1, 0.2, 0.3 and 0.5 nats" in " ".join(stability.__doc__.split())
    assert MARGINS == (0.1, 0.2, 0.3, 0.5)


@pytest.mark.parametrize(
    ("unstable", "expected"), [((), 3.0), ((3.0,), 2.0), ((2.0,), 1.0), ((1.0,), None), ((1.0, 2.0, 3.0), None)]
)
def test_a_rate_is_stable_if_no_smaller_one_is_not(unstable, expected):
    assert largest_stable((1.0, 2.0, 3.0), lambda rate: rate in unstable) == expected


def test_arms_are_held_against_their_own_best_and_the_baselines():
    found = sweep_of(
        {
            "baseline": {1e-3: [2.1, 2.0], 2e-3: [2.1, 2.45], 4e-3: [NAN, 2.1]},
            "qk_norm": {1e-3: [1.7, 1.7], 2e-3: [2.1, 2.1], 4e-3: [2.1, 2.45]},
        }
    )
    assert found.grids["baseline"].best == (pytest.approx(2.05), 1e-3)
    assert [found.stable("baseline", "own", margin) for margin in (0.1, 0.3, 0.5)] == [1e-3, 1e-3, 2e-3]
    assert [found.stable("qk_norm", "own", margin) for margin in (0.3, 0.5)] == [1e-3, 2e-3]
    assert [found.stable("qk_norm", "baseline", margin) for margin in (0.3, 0.5)] == [2e-3, 4e-3]
    assert found.grids["baseline"].stable_seeds(0.2) == [2e-3, 1e-3]
    assert found.grids["baseline"].stable(TRIGRAM) == 1e-3
    assert math.isnan(found.grids["baseline"].mean(4e-3))
    assert factor_cell(found, "qk_norm") == "×1 to ≥ ×2 (higher in 6 of 10)"


def test_rates_below_the_best_are_slow_and_not_unstable():
    found = sweep_of(
        {
            "baseline": {1e-3: [2.9], 2e-3: [2.0], 4e-3: [2.05]},
            "qk_norm": {1e-3: [NAN, NAN], 2e-3: [NAN, 2.0], 4e-3: [2.0, 2.0]},
        }
    )
    assert found.stable("baseline", "own", 0.1) == 4e-3
    assert found.stable("qk_norm", "own", 0.1) == 4e-3
    assert found.grids["qk_norm"].stable(1.9) is None
    assert factor_cell(found, "qk_norm") == "×1 to ≥ ×1 (higher in 0 of 10)"
    assert mean_cell(found.grids["qk_norm"].losses(2e-3)) == "nan"


def test_the_share_of_a_distance_is_shown_where_there_is_one():
    near, far = {1e-3: [2.0, 2.1]} | {rate: [2.0, 2.0] for rate in (2e-3, 4e-3)}, [2.1, 2.12]
    by_arm = {
        "qk_norm": near,
        "qkv_norm": dict.fromkeys(near, far),
        "qkv_norm with pre-norm": dict.fromkeys(near, [2.05, 2.06]),
    }
    text = "\n".join(between(sweep_of(by_arm), "qk_norm", "qkv_norm"))
    assert "| share of qkv_norm's |" in text
    assert "| qkv_norm | +0.060 ± 0.057 | +0.110 ± 0.014 | +0.110 ± 0.014 | 100% |" in text
    assert "| +0.055 ± 0.007 | 41% |" in text
    assert "share" not in "\n".join(between(sweep_of(by_arm | {"qkv_norm": near}), "qk_norm", "qkv_norm"))


def test_orderings_name_the_arms_that_are_first():
    found = sweep_of(
        {
            "baseline": {1e-3: [2.0], 2e-3: [2.4], 4e-3: [3.5]},
            "soft_cap": {1e-3: [2.0], 2e-3: [2.4], 4e-3: [NAN]},
            "qk_norm": {1e-3: [2.0], 2e-3: [2.0], 4e-3: [2.1]},
        }
    )
    text = "\n".join(verdicts(found))
    assert "in all of the 10 ways: qk_norm; in none of the 10 ways: soft_cap" in text
    assert "the trigram table: qk_norm (0.004 or more) > baseline, soft_cap (0.001)" in text
    assert "the bigram table: qk_norm (0.004 or more) > baseline, soft_cap (0.002)" in text
    assert "qk_norm 0.03, baseline" in text  # sensitivities


def test_the_sensitivity_counts_a_run_without_a_loss_as_one_that_did_not_learn():
    grid = sweep_of({"baseline": {1e-3: [2.0, 2.0], 2e-3: [3.0, 2.0], 4e-3: [NAN, 9.0]}}).grids["baseline"]
    assert grid.sensitivities() == pytest.approx([(0 + 1 + 2) / 3, (0 + 0 + 2) / 3])


def test_an_arm_counts_with_the_seeds_that_have_all_rates():
    part = {1e-3: [2.0, 2.0], 2e-3: [2.0], 4e-3: [2.0, 2.0]}
    found = sweep_of({"baseline": part, "qk_norm": {1e-3: [2.0]}})
    assert {arm: grid.seeds for arm, grid in found.grids.items()} == {"baseline": 1}


@pytest.mark.parametrize(
    ("rate", "baseline", "expected"),
    [(4e-2, 6e-3, "0.04 (×6.67)"), (8e-2, 1e-2, "≥ 0.08 (≥ ×8)"), (4e-2, None, "0.04"), (None, 6e-3, "–")],
)
def test_a_rate_is_formatted_with_its_ratio_to_the_baseline(rate, baseline, expected):
    assert rate_cell(rate, baseline, top=8e-2) == expected
