"""The search for the smallest knee that keeps the predictions, and fixed knees."""

from __future__ import annotations

import math

import pytest
import torch

from hf_qknorm import Scheme, calibrate, patch_model
from hf_qknorm.calibration.gains import ClosedFormGains, expected_powers, named_norms
from hf_qknorm.calibration.knees import KNEES, LIMIT, SHARPNESS, cost, tried_knees, with_margin
from hf_qknorm.model.knees import knee_of, sharpness_of
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


@pytest.mark.parametrize("most", [None, 1e-5, 0.002, 0.2])
def test_the_search_ends_above_the_smallest_knee_that_keeps_loss_and_predictions(most):
    model = patch_model(tiny_model("llama", initializer_range=0.3), "qk_norm")
    report = calibrate(model, batches(9), max_loss_increase=most)
    costs = {knee: cost(report.base, prediction) for knee, prediction in report.knees.items()}
    least = min(knee for knee in costs if costs[knee] <= (LIMIT if most is None else most))
    assert report.knee == pytest.approx(with_margin(least), rel=0.1)
    assert all(costs[knee] > costs[least] for knee in costs if knee < least)
    assert least == 0 or KNEES[KNEES.index(least) - 1] in costs
    assert len(costs) <= 5
    assert [*costs] == sorted(costs)


def test_the_margin_is_the_next_knee():
    found = {knee: with_margin(knee) for knee in (0.0, 0.5, 1.0, 2.0, 3.0, 32.0)}
    assert found == pytest.approx({0.0: 0.0, 0.5: 0.7071, 1.0: 1.4142, 2.0: 2.8284, 3.0: 4.0, 32.0: 32.0}, rel=1e-4)
    assert with_margin(2.0, (0.0, 2.0, 8.0)) == 8.0


@pytest.mark.parametrize("own", [None, 4])
def test_a_search_sets_sharp_norms_that_keep_the_mean_length(own):
    scheme = Scheme(q="rms", k="lp", p=3.0, gain="per_head", bias=True)
    model = patch_model(tiny_model("llama", initializer_range=0.3), scheme)
    report = calibrate(model, batches(12), max_loss_increase=1e-3, sharpness=own)
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


def test_the_bias_of_a_sharp_layer_norm_is_the_mean_that_it_takes_off():
    model = patch_model(tiny_model("llama"), Scheme(q="layer", k="layer", gain="per_head", bias=True))
    data = batches(4)
    calibrate(model, data, knee=4, sharpness=8)
    for key, x in norm_inputs(model, data).items():
        expected = x.mean((0, 2))[:, None].expand(-1, x.shape[2])
        torch.testing.assert_close(named_norms(model)[key].bias.double(), expected, rtol=1e-4, atol=1e-6)


def keyed(cap: float | None) -> torch.nn.Module:
    """A patched model whose keys have a large bias that no query tells apart: large logits that mean little."""
    model = tiny_model("qwen2", initializer_range=0.1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias[:] = layer.self_attn.k_proj.bias[:] = 12.0
    return patch_model(model, Scheme(q="auto", k="auto", softcap=cap))


def test_a_cap_that_costs_too_much_is_named_with_one_that_costs_less(caplog):
    assert not calibrate(keyed(None), batches(9)).loss > 10
    assert "no knee costs less" not in caplog.text
    model = keyed(10.0)
    report = calibrate(model, batches(9))
    assert report.scheme == model.config.scheme
    assert all(layer.self_attn.scheme == report.scheme for layer in model.model.layers)
    (message,) = (record.getMessage() for record in caplog.records if "no knee costs less" in record.getMessage())
    assert "In place of the cap of 10, " in message
    assert "costs 0.00" in message
    with pytest.raises(ValueError, match=r"knee 32 costs .* than max_loss_increase=0.001. In place of the cap of 10"):
        calibrate(model, batches(9), max_loss_increase=0.001)


@pytest.mark.parametrize("start", [0.0, 2.0])
def test_an_error_or_an_interrupt_restores_the_norms(start):
    model = patch_model(tiny_model("llama", initializer_range=0.3), Scheme(q="rms", k="layer"))
    calibrate(model, batches(3), "moments", knee=start)
    assert_unchanged_after_failures(model, "auto")


def test_an_error_or_an_interrupt_restores_projections_behind_folded_norms():
    model = patch_model(tiny_model("gpt2", initializer_range=0.3), "qkv_norm")
    assert_unchanged_after_failures(model, None)
    x = tokens(1, 8)
    before = model(x).logits
    calibrate(model, batches(3))
    assert not torch.equal(model(x).logits, before)
    assert_unchanged_after_failures(model, None)


def assert_unchanged_after_failures(model, knee):
    """A calibration that a limit, an interrupt at any pass, or its report ends leaves the model as it was."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scheme, attributes = model.config.scheme, {name: sorted(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match="more than max_loss_increase=-9"):
        calibrate(model, batches(9), knee=knee, max_loss_increase=-9)
    left = [1]

    def interrupt(*_: object) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    hook = model.register_forward_pre_hook(interrupt)
    for place in (1, 4, 8, 12):
        left[0] = place
        with pytest.raises(KeyboardInterrupt):
            calibrate(model, batches(9), knee=knee)
    hook.remove()
    assert model.config.scheme == scheme
    assert all(layer.scheme == scheme for layer in model.modules() if hasattr(layer, "scheme"))
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_trials_set_every_knee_and_leave_the_model_as_it_was():
    model = patch_model(tiny_model("llama", initializer_range=0.3), "qk_norm")
    data = batches(4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with tried_knees(model, data, KNEES, []) as predicted:
        for knee in KNEES:
            _, own = predicted(knee)
            assert knee_of(model) == pytest.approx(knee, rel=1e-3)
            assert math.isfinite(own.loss)
            assert own.kl >= 0
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_one_sequence_gives_the_gains_and_judges_them():
    model = patch_model(tiny_model("llama", initializer_range=0.3), "qk_norm")
    data = [{"input_ids": tokens(1, 40)}]
    assert calibrate(model, data).knee
    powers = expected_powers(model, data)
    assert powers == pytest.approx({key: norm.mean_power() for key, norm in named_norms(model).items()}, rel=0.1)


@pytest.mark.parametrize(
    ("scheme", "arguments", "options", "knee", "searched"),
    [
        ("qk_norm", (), {"knee": "auto"}, None, True),
        ("qk_norm", (), {"knee": 0}, 0, False),
        ("qk_norm", ("moments",), {}, 0, False),
        ("qk_norm", ("moments",), {"knee": 4}, 4, False),
        ("qk_norm", ("ones",), {"knee": 4}, 4, False),
        ("qkv_norm", (), {}, 0, False),
        ("soft_cap", (), {}, 0, False),
    ],
)
def test_the_knee_is_searched_only_without_method_and_knee(scheme, arguments, options, knee, searched):
    model = patch_model(tiny_model("llama", initializer_range=0.3), scheme)
    report = calibrate(model, batches(8), *arguments, **options)
    assert report.knee == knee_of(model)
    assert report.sharpness == (8 if searched else 1)
    assert bool(report.knees) == searched
    assert knee is None or report.knee == pytest.approx(knee, rel=0.1)


@pytest.mark.parametrize(
    ("scheme", "options", "error"),
    [
        ("qk_norm", {"knee": "best"}, "knee='best': expected a number ≥ 0, \"auto\", or None"),
        ("qk_norm", {"knee": -1}, "knee=-1: expected a number ≥ 0"),
        ("qk_norm", {"knee": math.nan}, "knee=nan: expected a number ≥ 0"),
        ("qk_norm", {"sharpness": 0.5}, "sharpness=0.5: expected a number ≥ 1"),
        ("qk_norm", {"method": "ones", "knee": "auto"}, 'name another method than "ones"'),
        ("qk_norm", {"max_loss_increase": math.inf}, "max_loss_increase=inf is no limit"),
        ("qkv_norm", {"knee": 4}, "a norm with a knee keeps part of the scale"),
    ],
)
def test_impossible_knees_are_refused_by_name(scheme, options, error):
    model = patch_model(tiny_model("llama"), scheme)
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
