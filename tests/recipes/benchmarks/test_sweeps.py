"""The sweeps and the table of costs, from end to end, each at its smallest size: their logs and their verdicts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import arms
import cost
import lp
import pytest
import stability
import torch
from ngrams import ngram_loss
from observations import COLUMNS, Observations
from run_log import Runs, thinned
from stability_page import between, factor_cell, mean_cell, rate_cell
from stability_table import MARGINS, Sweep, diverged, largest_stable
from stability_verdicts import verdicts
from sweep import FOLDS, Characters, Size, train

from hf_qknorm import QKClip, logit_statistics
from hf_qknorm.demo.training import decay_groups
from hf_qknorm.model.attention import patched_layers

NAN, INF = math.nan, math.inf


BIGRAM, TRIGRAM = 3.0, 2.2


def result(held_out: float, *losses: float) -> dict[str, Any]:
    seen = {name: [1.0, 2.0] for name in COLUMNS} | {"step": [0, 3]}
    return {"losses": [*(losses or (4.0, 3.0)), held_out], "held_out": held_out, "initial": 4.0, "seen": seen}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sweep_of(results: dict[str, dict[float, list[float]]]) -> Sweep:
    """A sweep of runs with these held-out losses, through the rows of a log."""
    log = [
        {"settings": {"arm": arm, "rate": rate, "seed": seed}, "result": result(loss)}
        for arm, by_rate in results.items()
        for rate, losses in by_rate.items()
        for seed, loss in enumerate(losses)
    ]
    return Sweep.of(log, list(results), (1e-3, 2e-3, 4e-3), (BIGRAM, TRIGRAM))


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


# The sweeps: all arms, and a finished run is not run again


def sweep_stability(text: str, folder: Path, *more: str) -> dict[str, Sweep]:
    command = ["--size", "quick", "--text", text, "--seeds", "1", "--jobs", "1"]
    return stability.main([*command, "--out", str(folder / "stability"), *more])


def sweep_stability_in_part(text: str, folder: Path) -> Any:
    return sweep_stability(text, folder, "--arms", "baseline", "qk_norm", "--parts", "rates")


def sweep_lp(text: str, folder: Path) -> Any:
    return lp.main(["--size", "quick", "--text", text, "--folds", "2", "--jobs", "1", "--out", str(folder / "lp")])


def test_the_stability_page_has_every_arm_and_the_paper(text, tmp_path, monkeypatch):
    few = {part: replace(grid, rates=(2e-3, 4e-3)) for part, grid in stability.PARTS.items()}
    monkeypatch.setattr(stability, "PARTS", few)
    found = sweep_stability(text, tmp_path)
    assert {part: list(sweep.grids) for part, sweep in found.items()} == {
        part: list(grid.arms) for part, grid in stability.PARTS.items()
    }
    page = (tmp_path / "stability.md").read_text()
    for arm in arms.ALL_ARMS:
        assert f"\n| {arm} |" in page
    for cell in ("0.06 (×10)", "0.04 (×6.67)", "| trigram table |", "| bigram table |"):
        assert cell in page
    plots = re.findall(r"\((stability-.*?\.png)\)", page)
    assert len(plots) == 6
    for name in plots:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    kept = rows(tmp_path / "stability.jsonl")
    assert len(kept) == len({json.dumps(row["settings"]) for row in kept})
    assert len(kept) == 2 * len(arms.ALL_ARMS)  # qk_norm, qkv_norm, baseline and QuacK are in two parts
    assert all(row["made"]["torch"] == torch.__version__ and row["made"]["commit"] for row in kept)


@pytest.mark.parametrize(("recipe", "sweep"), [(stability, sweep_stability_in_part), (lp, sweep_lp)])
def test_a_sweep_continues_where_it_stopped(recipe, sweep, text, tmp_path, monkeypatch):
    monkeypatch.setattr(stability, "draw", lambda sweeps, out: {part: [] for part in sweeps})
    first = sweep(text, tmp_path)
    path = tmp_path / f"{recipe.__name__}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:20])  # killed while it wrote
    ran: list[Any] = []
    run_one: Callable[..., Any] = recipe.run_one
    monkeypatch.setattr(recipe, "run_one", lambda *given, **more: ran.append(given) or run_one(*given, **more))
    second = sweep(text, tmp_path)
    assert len(ran) == 1
    for row, line in zip(rows(path), lines, strict=True):  # and the run that was done again gave the same
        assert (row["settings"], row["result"]) == tuple(json.loads(line)[key] for key in ("settings", "result"))
    assert json.dumps(str(first)) == json.dumps(str(second))


def test_a_sweep_without_time_is_continued_later(text, tmp_path, capsys):
    assert not any(found.grids for found in sweep_stability(text, tmp_path, "--minutes", "0").values())
    assert "still to do" in capsys.readouterr().out
    assert rows(tmp_path / "stability.jsonl") == []
    assert "Runs that are done: rates 0 of 56, qkv 0 of 16, quack 0 of 27." in (tmp_path / "stability.md").read_text()


def test_unknown_arms_are_refused(text, tmp_path):
    with pytest.raises(ValueError, match="expected some of baseline, soft_cap"):
        sweep_stability(text, tmp_path, "--arms", "qknorm")


def test_other_settings_are_other_runs(tmp_path):
    runs = Runs(tmp_path / "runs.jsonl")
    assert runs.get({"rate": 1}, lambda: {"loss": 1}) == {"loss": 1}
    assert runs.get({"rate": 2}, lambda: {"loss": 2}) == {"loss": 2}
    assert Runs(tmp_path / "runs.jsonl").get({"rate": 1}, lambda: {"loss": 3}) == {"loss": 1}


def test_two_writers_of_a_log_store_each_run_once(tmp_path):
    first, second = (Runs(tmp_path / "runs.jsonl") for _ in range(2))
    assert first.get({"rate": 1}, lambda: {"loss": 1}) == {"loss": 1}
    assert second.get({"rate": 1}, lambda: {"loss": 2}) == {"loss": 1}
    second.get({"rate": 2}, lambda: {"loss": 2})
    first.get({"rate": 3}, lambda: {"loss": 3})
    assert [row["settings"]["rate"] for row in rows(tmp_path / "runs.jsonl")] == [1, 2, 3]


def test_a_line_of_a_killed_writer_is_cut_off(tmp_path):
    path = tmp_path / "runs.jsonl"
    Runs(path).get({"rate": 1}, lambda: {"loss": 1})
    with path.open("a") as file:
        file.write('{"settings": {"ra')
    runs = Runs(path)
    runs.get({"rate": 2}, lambda: {"loss": 2})
    assert [row["settings"]["rate"] for row in rows(path)] == [1, 2]


def test_a_run_that_fails_does_not_lose_the_others(tmp_path):
    runs = Runs(tmp_path / "runs.jsonl")
    with pytest.raises(ZeroDivisionError):
        runs.run_all([{"x": 0}, {"x": 1}], partial(eval, "{'y': 1 / x}"), jobs=2)
    assert runs.find({"x": 1}) == {"y": 1.0}


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


# What the arms and the observations do


def run(text: str, arm: str, rate: float = 0.05) -> dict[str, Any]:
    settings = {"arm": arm, "rate": rate, "seed": 0, **asdict(stability.SIZES["quick"])}
    return stability.run_one(settings, text, "cpu")


@pytest.mark.parametrize(("arm", "same"), [("QuacK", False), ("QuacK, τ = 0.1", False), ("QK-clip", True)])
def test_the_arms_differ_from_the_baseline_where_they_should(arm, same, text):
    assert (run(text, "baseline") == run(text, arm)) is same  # no logit of these passes 100


def test_the_arm_of_qk_clip_clips(text, monkeypatch):
    monkeypatch.setattr(arms, "QKClip", lambda model: QKClip(model, threshold=1e-3))
    logits = [run(text, arm)["seen"]["logit"][-1] for arm in ("QK-clip", "baseline")]
    assert logits[0] < 0.1 * logits[1]


def test_a_constant_factor_scales_steps_of_queries_and_keys_alone(text):
    size = stability.SIZES["quick"]
    steps = []
    for arm in ("baseline", "constant, α = 0.1"):
        torch.manual_seed(0)
        model = size.build(20, "none")
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = arms.ALL_ARMS[arm].around(model, torch.optim.SGD(model.parameters(), lr=1.0))
        ids = torch.randint(20, (2, size.length))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        steps.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
    for name, step in steps[0].items():
        factor = torch.ones(step.shape[-1])
        if "c_attn" in name:
            factor[: 2 * size.width] = 0.1
        torch.testing.assert_close(steps[1][name], step * factor, atol=1e-7, rtol=1e-4)


def test_weights_alone_scale_steps_by_the_other_sides_norm_as_published():
    size = stability.SIZES["quick"]
    model: Any = size.build(20, "none")
    weight = model.transformer.h[0].attn.c_attn.weight
    optimizer = arms.ALL_ARMS["QuacK, weights alone"].around(model, torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.zeros_like(weight)
    optimizer.step()  # notes the initial norms
    with torch.no_grad():
        weight[:, size.width : 2 * size.width] *= 4  # keys
        model.transformer.h[0].attn.c_attn.bias.fill_(9)
    before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
    optimizer.step()
    steps = (before - weight.detach()).split(size.width, dim=1)
    for step, expected in zip(steps, (0.25, 1, 1), strict=True):
        torch.testing.assert_close(step, torch.full_like(step, expected))


def test_each_arm_between_the_norms_changes_its_part_alone():
    size = stability.SIZES["quick"]

    def state(arm: str) -> tuple[bool, bool, float, float]:
        model: Any = size.build(20, arms.QKV_ARMS[arm].scheme)
        arms.QKV_ARMS[arm].change(model)
        block = model.transformer.h[0]
        v_norm = block.attn._modules.get("v_norm")
        gain = float(v_norm.weight.mean()) if v_norm else 0.0
        return isinstance(block.ln_1, torch.nn.LayerNorm), v_norm is not None, round(gain, 3), block.attn.q_norm.eps

    assert {arm: state(arm) for arm in arms.QKV_ARMS} == {
        "qk_norm": (True, False, 0, 1e-6),
        "qk_norm, pre-norm without gain and bias": (True, False, 0, 1e-6),
        "qk_norm without pre-norm": (False, False, 0, 1e-6),
        "qkv_norm": (False, True, 1, 1e-6),
        "qkv_norm, eps 1e-12": (False, True, 1, 1e-12),
        "qkv_norm, small value gain": (False, True, 0.08, 1e-6),
        "qkv_norm with pre-norm": (True, True, 1, 1e-6),
        "qkv_norm with pre-norm, small value gain": (True, True, 0.08, 1e-6),
    }


def test_norms_after_the_output_projections_bound_them(text):
    size = stability.SIZES["quick"]
    model: Any = size.build(20, "qk_norm")
    arms.ARMS["QK_FC_norm"].change(model)
    block = model.transformer.h[0]
    for part in (block.attn, block.mlp):
        with torch.no_grad():
            part.c_proj[0].weight.mul_(1e3)
    out = block.mlp(torch.randn(2, 3, size.width))
    assert float(out.detach().pow(2).mean().sqrt()) == pytest.approx(1, abs=1e-3)
    assert math.isfinite(run(text, "QK_FC_norm")["held_out"])


@pytest.mark.parametrize("scheme", ["none", "qk_norm"])
def test_observations_are_those_of_the_whole_attention_matrix(scheme):
    torch.manual_seed(0)
    model: Any = Size(1, 2, 16, 16, 2, steps=1).build(20, scheme)
    ids = torch.randint(20, (3, 16))
    layer = model.transformer.h[0].attn
    with torch.no_grad():
        layer.c_attn.weight.normal_()
    seen = Observations(model, ids, every=1)

    def matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        kept: list[torch.Tensor] = []
        hook = layer.c_attn.register_forward_hook(lambda module, given, out: kept.append(out))
        with torch.no_grad():
            model(input_ids=ids)
        hook.remove()
        q, k, _ = (x.unflatten(-1, (2, 8)) for x in kept[0].split(16, -1))
        if scheme == "qk_norm":
            q, k = layer.q_norm(q), layer.k_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), kept[0], torch.ones(16, 16, dtype=torch.bool).tril()

    seen(0)
    q, k, out, visible = (x.detach() for x in matrices())
    logits = q @ k.mT / 8**0.5
    found = {name: column[0] for name, column in seen.columns.items() if column}
    assert found["logit"] == pytest.approx(float(logits[..., visible].abs().max()), rel=1e-3)
    assert found["qkv"] == pytest.approx(float(out.pow(2).mean().sqrt()), rel=1e-3)
    with logit_statistics(model) as statistics, torch.no_grad():
        model(input_ids=ids)
    (layer_statistics,) = statistics.values()
    assert found["proj"] == pytest.approx(float(layer_statistics.rms_out), rel=1e-3)
    assert found["fc2"] == pytest.approx(float(layer_statistics.rms_mlp), rel=1e-3)
    shares = torch.softmax(logits.masked_fill(~visible, -INF), -1)
    entropy = torch.special.entr(shares).sum(-1).mean((0, 2)) / torch.arange(1, 17).log().mean()
    assert found["entropy"] == pytest.approx(float(entropy.mean()), rel=1e-3)
    assert found["lowest"] == pytest.approx(float(entropy.min()), rel=1e-3)
    with torch.no_grad():
        layer.c_attn.weight[:, :16].add_(0.01 * torch.randn(16, 16))  # a step of the queries alone
    new = (matrices()[0].detach() - q) @ k.mT / 8**0.5
    seen(1)
    assert seen.columns["query_step"] == [pytest.approx(float(new[..., visible].abs().mean()), rel=1e-3)]
    assert seen.columns["key_step"] == [0]


# What they stand on


def test_the_loss_of_a_table_is_that_of_counted_characters():
    seen, held_out = torch.tensor([0, 1, 0, 1, 1, 0]), torch.tensor([0, 1, 1])
    after_0, after_1 = (2 + 0.1) / (2 + 0.2), (1 + 0.1) / (3 + 0.2)
    assert ngram_loss(seen, held_out, 2, 2) == pytest.approx(-(math.log(after_0) + math.log(after_1)) / 2)
    after_01 = (1 + 0.1) / (2 + 0.2)
    assert ngram_loss(seen, held_out, 2, 3) == pytest.approx(-math.log(after_01))


def test_the_whole_held_out_text_is_for_judging(text):
    characters, size = Characters(text), Size(1, 2, 16, length=16, batch=4, steps=1)
    judged = torch.cat(characters.judging(size)).flatten()
    assert torch.equal(judged, characters.held_out[: len(judged)])
    assert len(characters.held_out) - len(judged) < 16 or len(judged) == size.judge * 16


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
