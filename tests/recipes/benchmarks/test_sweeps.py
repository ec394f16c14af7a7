"""The sweeps from end to end, at their smallest size; their texts, batches and rates."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import arms
import lp
import pytest
import stability
import torch
from ngrams import ngram_loss
from stability_table import Sweep
from sweep import FOLDS, Characters, Size, train

from hf_qknorm.demo.training import decay_groups
from hf_qknorm.model.attention import patched_layers


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    optimizer = torch.optim.SGD(model.parameters(), lr=math.inf)
    losses = train(model, characters.training(size, 0), optimizer)
    assert len(losses) == 2
    assert not math.isfinite(losses[-1])


def test_gains_have_no_weight_decay():
    model = Size(1, 2, 16, 16, 2, steps=1).build(10, "qk_norm")
    (matrices, others) = decay_groups(model, 0.1)
    gains = {id(p) for layer in patched_layers(model).values() for p in layer.q_norm.parameters()}
    assert gains <= {id(p) for p in others["params"]}
    assert others["weight_decay"] == 0
    assert len(matrices["params"]) + len(others["params"]) == len(list(model.parameters()))
