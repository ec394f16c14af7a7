"""Gains for every knee from one pass, and the search for the smallest knee that keeps the predictions."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest
import torch

from hf_qknorm import Scheme, calibrate, patch_model
from hf_qknorm.calibration import knees
from hf_qknorm.calibration.gains import ClosedFormGains, expected_powers, named_norms
from hf_qknorm.calibration.knees import (
    KNEES,
    LIMIT,
    OUTPUT_LIMIT,
    SHARPNESS,
    search_knee,
    search_outputs,
    tried_knees,
    with_margin,
)
from hf_qknorm.measure.distributed import ONE_PROCESS
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.knees import knee_of, sharpness_of
from hf_qknorm.reports.records import Prediction
from qknorm_tests.covering import covering
from qknorm_tests.tables import norm_inputs
from qknorm_tests.tables import random_tokens as tokens
from qknorm_tests.tiny import tiny_model


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": tokens(2, 20, seed)} for seed in range(count)]


def test_a_text_with_another_power_than_expected_takes_a_second_pass():
    model = patch_model(tiny_model("llama"), Scheme(q="rms", k="rms"))
    data = batches(3)
    right = expected_powers(model, data)
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(None))
    once = ClosedFormGains(model, data, right, (4.0,))
    assert len(passes) == 3
    twice = ClosedFormGains(model, data, {key: 100 * size for key, size in right.items()}, (4.0,))
    assert len(passes) == 9
    assert twice.powers == once.powers == pytest.approx(right)
    for key, found in once.sums.items():
        for got, want in zip(twice.sums[key].at(4.0), found.at(4.0), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("scheme", ["qk_norm", "henry", "lp", Scheme(q="layer", k="l2", v="rms", gain="per_head")])
def test_a_fixed_knee_is_relative_to_the_mean_power_of_the_whole_text(scheme):
    model = patch_model(tiny_model("llama"), scheme)
    data = batches(9)
    report = calibrate(model, data, knee=4)
    assert report.knee == pytest.approx(4, rel=0.1)
    assert report.knees == {}
    for key, x in norm_inputs(model, data).items():
        norm = named_norms(model)[key]
        y = x - x.mean(-1, keepdim=True) if norm.norm == "layer" else x
        assert norm.mean_power() == pytest.approx(float(y.abs().pow(norm.order).mean()), rel=0.1)
        assert norm.ratio == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize("count", [16, 17, 20])
def test_the_default_takes_about_two_forward_passes_over_a_long_text(count):
    model = patch_model(tiny_model("llama", initializer_range=0.2), "qk_norm")
    sequences = []
    model.register_forward_pre_hook(lambda _, args, given: sequences.append(len(given["input_ids"])), with_kwargs=True)
    calibrate(model, [tokens(8, 128, seed) for seed in range(count)])
    assert sum(sequences) <= 2.2 * 8 * count


class Recorded:
    """A stand-in for `ClosedFormGains`: records the knees, and predicts by a function of the knee."""

    model, ranks = None, ONE_PROCESS

    def __init__(self, monkeypatch: pytest.MonkeyPatch, predicted: Callable[[float], Prediction]) -> None:
        self.tried: list[float] = []
        monkeypatch.setattr(knees, "predictions", lambda *_: (BASE, predicted(self.tried[-1])))

    def apply(self, knee: float) -> None:
        self.tried.append(knee)


BASE = Prediction(2.0)


@pytest.mark.parametrize(("first", "most", "by"), covering(range(len(KNEES)), [None, 0.2], ["loss", "kl"], strength=1))
def test_the_search_ends_above_the_smallest_knee_that_keeps_loss_and_predictions(first, most, by, monkeypatch):
    limit = LIMIT if most is None else most
    costs = {knee: limit * (0.9 if i >= first else 1.1) for i, knee in enumerate(KNEES)}

    def predicted(knee: float) -> Prediction:
        return Prediction(2.0 + costs[knee]) if by == "loss" else Prediction(1.9, kl=costs[knee])

    found = Recorded(monkeypatch, predicted)
    tried = search_knee(found, [], BASE, most, [])
    chosen = with_margin(KNEES[first])
    assert found.tried[-1] == chosen
    assert tried[KNEES[first]] == predicted(KNEES[first])
    assert tried[chosen] == predicted(chosen)
    assert len(tried) <= 5
    assert [*tried] == sorted(tried)


@pytest.mark.parametrize("first", [0, 3, len(KNEES) - 1])
def test_the_search_by_outputs_ends_above_the_smallest_knee_that_keeps_them(first, monkeypatch):
    found = Recorded(monkeypatch, lambda knee: BASE)
    error = {knee: OUTPUT_LIMIT * (1 if i >= first else 1.1) for i, knee in enumerate(KNEES)}
    monkeypatch.setattr(knees, "output_error", lambda *_: error[found.tried[-1]])
    search_outputs(found, [])
    assert found.tried[-1] == with_margin(KNEES[first])


def test_the_margin_is_the_next_knee():
    found = {knee: with_margin(knee) for knee in (0.0, 0.5, 1.0, 2.0, 3.0, 32.0)}
    assert found == pytest.approx({0.0: 0.0, 0.5: 0.7071, 1.0: 1.4142, 2.0: 2.8284, 3.0: 4.0, 32.0: 32.0}, rel=1e-4)
    assert with_margin(2.0, (0.0, 2.0, 8.0)) == 8.0


@pytest.mark.parametrize("own", [None, 4])
def test_a_search_sets_sharp_norms_that_keep_the_mean_length(own):
    scheme = Scheme(q="rms", k="lp", p=3.0, gain="per_head", bias=True)
    model = patch_model(tiny_model("llama", initializer_range=0.3), scheme)
    data = batches(12)
    report = calibrate(model, data, max_loss_increase=1e-3, sharpness=own)
    assert report.scheme == model.config.scheme
    assert report.knee == knee_of(model) >= 0.9
    assert report.sharpness == sharpness_of(model) == (own or SHARPNESS)
    for norm in named_norms(model).values():
        assert norm.shape.sharpness == report.sharpness
        assert (norm.weight == 1).all()
        assert not norm.bias.any()
        power = norm.mean_power()
        x = torch.randn(3, norm.head_dim, dtype=torch.float64)
        x = x * (power / x.abs().pow(norm.order).mean(-1, keepdim=True)) ** (1 / norm.order)
        torch.testing.assert_close(norm(x[:, None].expand(-1, len(norm.weight), -1))[:, 0], x, rtol=1e-5, atol=0)


def test_if_all_knees_cost_too_much_the_smallest_near_the_lowest_cost_is_set(monkeypatch, caplog):
    found = Recorded(monkeypatch, lambda knee: Prediction(2.3 + 0.004 / (1 + knee), kl=0.1))
    with caplog.at_level(logging.WARNING, logger="hf_qknorm"):
        search_knee(found, [], BASE, None, [])
    assert found.tried[-1] == 0
    assert "no knee costs less than 0.0050 nats: 32 costs 0.3001 (loss 2.3001 over 2.0000)" in caplog.text
    with pytest.raises(ValueError, match=r"the knee 32 costs 0.3001 nats .* more than max_loss_increase=0.01"):
        search_knee(found, [], BASE, 0.01, [])


@pytest.mark.parametrize("start", [0.0, 2.0])
def test_an_error_or_an_interrupt_restores_the_norms(start):
    model = patch_model(tiny_model("llama", initializer_range=0.3), Scheme(q="rms", k="layer"))
    calibrate(model, batches(3), "moments", knee=start)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scheme = model.config.scheme
    with pytest.raises(ValueError, match="max_loss_increase=-1"):
        calibrate(model, batches(9), knee="auto", max_loss_increase=-1)
    with pytest.raises(ValueError, match="the loss rises by .* more than max_loss_increase=-1"):
        calibrate(model, batches(9), knee=8, max_loss_increase=-1)
    calls = []

    def interrupt(*_: object) -> None:
        calls.append(None)
        if len(calls) == 12:
            raise KeyboardInterrupt

    hook = model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, batches(9), knee="auto")
    hook.remove()
    assert model.config.scheme == scheme
    assert all(layer.scheme == scheme for layer in patched_layers(model).values())
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-6, atol=0, msg=name)


def test_trials_set_every_knee_and_leave_the_model_as_it_was():
    model = patch_model(tiny_model("llama", initializer_range=0.3), "qk_norm")
    data = batches(4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with tried_knees(model, data[1:], data[:1], KNEES, []) as predicted:
        for knee in KNEES:
            own = predicted(knee)
            assert knee_of(model) == pytest.approx(knee, rel=1e-3)
            assert math.isfinite(own.loss)
            assert own.kl >= 0
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_one_sequence_gives_the_gains_and_judges_them():
    model = patch_model(tiny_model("llama", initializer_range=0.3), "qk_norm")
    data = [{"input_ids": tokens(1, 40)}]
    assert calibrate(model, data).knee
    norms = named_norms(model)
    powers = ClosedFormGains(model, data, dict.fromkeys(norms, 0.0), ()).powers
    assert powers == pytest.approx({key: norm.mean_power() for key, norm in norms.items()}, rel=0.1)


def test_the_knee_is_searched_only_without_method_and_knee():
    def found(scheme, *arguments, **options):
        model = patch_model(tiny_model("llama", initializer_range=0.3), scheme)
        report = calibrate(model, batches(8), *arguments, **options)
        assert report.knee == knee_of(model)
        assert report.sharpness == (8 if report.knees else 1)
        return round(report.knee, 0), bool(report.knees)

    assert found("qk_norm")[1]
    assert found("qk_norm", knee="auto")[1]
    assert found("qk_norm", knee=0) == (0, False)
    assert found("qk_norm", "moments") == (0, False)
    assert found("qk_norm", "moments", knee=4) == (4, False)
    assert found("qk_norm", "ones", knee=4) == (4, False)
    assert found("qkv_norm") == (0, False)
    assert found("soft_cap") == (0, False)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"knee": "best"}, "knee='best': expected a number ≥ 0, \"auto\", or None"),
        ({"knee": -1}, "knee=-1: expected a number ≥ 0"),
        ({"knee": math.nan}, "knee=nan: expected a number ≥ 0"),
        ({"sharpness": 0.5}, "sharpness=0.5: expected a number ≥ 1"),
        ({"method": "ones", "knee": "auto"}, 'name another method than "ones"'),
        ({"max_loss_increase": math.inf}, "max_loss_increase=inf is no limit"),
    ],
)
def test_impossible_knees_are_refused_by_name(options, error):
    model = patch_model(tiny_model("llama"), "qk_norm")
    with pytest.raises(ValueError, match=error):
        calibrate(model, batches(2), **options)


def test_a_model_whose_loss_is_not_finite_is_refused():
    model = patch_model(tiny_model("llama"), "qk_norm")
    with torch.no_grad():
        model.lm_head.weight[3, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"the loss with a knee of 32 is nan \(unpatched nan\), expected finite numbers"
    ):
        calibrate(model, batches(2))
    with pytest.raises(ValueError, match=r"the loss rises by nan nats \(nan to nan\), more than max_loss_increase=1"):
        calibrate(model, batches(2), knee=4, max_loss_increase=1)


def test_schemes_without_a_knee_are_refused():
    with pytest.raises(ValueError, match="a norm with a knee keeps part of the scale"):
        calibrate(patch_model(tiny_model("llama"), "qkv_norm"), batches(2), knee=4)
