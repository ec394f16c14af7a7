"""The search for the smallest knee that keeps the predictions, and fixed knees."""

import math
import re

import pytest
import torch

from hf_qknorm import Scheme, calibrate, patch_model
from hf_qknorm.calibration.gains import ClosedFormGains, named_norms
from hf_qknorm.calibration.knees import KNEES, LIMIT, SHARPNESS, cost
from hf_qknorm.model.knees import knee_of, sharpness_of
from hf_qknorm.norms import NORMS
from qknorm_tests.tables import norm_inputs
from qknorm_tests.tables import random_tokens as tokens
from qknorm_tests.tiny import tiny_model


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": tokens(2, 20, seed)} for seed in range(count)]


def test_a_text_unlike_its_sample_takes_a_second_pass():
    found, counts, data = [], [], batches(3)
    for factor in (1.0, 0.1):
        model, passes = patch_model(tiny_model("llama"), Scheme(q="rms", k="rms")), []
        model.register_forward_pre_hook(lambda *_, passes=passes: passes.append(None))
        for layer in model.model.layers:  # in the pass of the sample, queries have another length
            layer.self_attn.q_proj.register_forward_hook(
                lambda _, __, out, factor=factor, passes=passes: out * (factor if len(passes) == 1 else 1.0)
            )
        ClosedFormGains(model, data, data[:1], (4.0,)).apply(4.0)
        counts.append(len(passes))
        found.append([x for norm in named_norms(model).values() for x in (*norm.weight.tolist(), norm.mean_power())])
    assert counts == [1 + 3, 1 + 3 + 3]
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize("scheme", ["lp", Scheme(q="layer", k="l2", v="rms", gain="per_head")])
def test_a_fixed_knee_is_relative_to_the_mean_power_of_the_whole_text(scheme):
    model = patch_model(tiny_model("llama"), scheme)
    data = batches(9)
    report = calibrate(model, data, knee=4)
    assert report.knee == pytest.approx(4, rel=0.1)
    assert report.knees == {}
    for key, x in norm_inputs(model, data).items():
        norm = named_norms(model)[key]
        y = x - x.mean(-1, keepdim=True) if NORMS[norm.norm].centred else x
        assert norm.mean_power() == pytest.approx(float(y.abs().pow(norm.order).mean()), rel=0.1)
        assert norm.ratio == pytest.approx(4, rel=0.15)


def test_the_default_takes_about_two_forward_passes_over_a_long_text():
    model = patch_model(tiny_model("llama", initializer_range=0.2), "qk_norm")
    sequences = []
    model.register_forward_pre_hook(lambda _, args, given: sequences.append(len(given["input_ids"])), with_kwargs=True)
    calibrate(model, [tokens(8, 128, seed) for seed in range(16)])
    assert sum(sequences) <= 2.2 * 8 * 16


@pytest.mark.parametrize("most", [None, 1e-5, 0.2])
def test_the_search_ends_above_the_smallest_knee_that_keeps_loss_and_predictions(most):
    model = patch_model(tiny_model("llama", initializer_range=0.3), "qk_norm")
    report = calibrate(model, batches(9), max_loss_increase=most)
    costs = {knee: cost(report.base, prediction) for knee, prediction in report.knees.items()}
    least = min(knee for knee in costs if costs[knee] <= (LIMIT if most is None else most))
    margin = min([knee for knee in KNEES if knee > least] or [32]) if least else 0  # the next one
    assert report.knee == pytest.approx(margin, rel=0.1)
    assert all(costs[knee] > costs[least] for knee in costs if knee < least)
    assert least == 0 or KNEES[KNEES.index(least) - 1] in costs
    assert len(costs) <= 5
    assert [*costs] == sorted(costs)


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


def test_a_cap_that_costs_too_much_is_warned_of_or_refused(caplog):
    assert not calibrate(keyed(None), batches(9)).loss > 10
    assert "more than the limit" not in caplog.text
    model = keyed(10.0)
    report = calibrate(model, batches(9))
    costs = {knee: cost(report.base, prediction) for knee, prediction in report.knees.items()}
    assert min(knee for knee in costs if costs[knee] <= costs[KNEES[-1]] + LIMIT) == report.knee == 0
    (message,) = (record.getMessage() for record in caplog.records if "more than the limit" in record.getMessage())
    assert "the knee 32 costs" in message
    assert "nats per token, more than the limit of 0.005, by another part of the scheme: in place of the cap" in message
    assert re.search(r"the cap of 10, (softcap=\d+|no cap \(softcap=None\)) costs 0\.00\d\d nats", message)
    assert all(layer.self_attn.scheme == report.scheme for layer in model.model.layers)
    assert f"The knee is set to {report.knee:.3g}, which adds little" in message
    with pytest.raises(
        ValueError, match=r"knee 32 costs .* than max_loss_increase=0.001, .* in place of the cap of 10, .*; or raise"
    ):
        calibrate(model, batches(9), max_loss_increase=0.001)


@pytest.mark.parametrize(
    ("model_type", "scheme", "knee", "first"),
    [
        ("llama", Scheme(q="rms", k="layer"), "auto", 2.0),
        ("gpt2", "qkv_norm", None, None),  # scales projections behind folded norms
        ("gpt2", "qkv_norm", None, 0),
    ],
)
def test_a_limit_or_an_interrupt_at_any_pass_leaves_the_model_as_it_was(model_type, scheme, knee, first):
    model = patch_model(tiny_model(model_type, initializer_range=0.3), scheme)
    if first is not None:
        x = tokens(1, 8)
        logits = model(x).logits
        calibrate(model, batches(3), knee=first)
        assert not torch.equal(model(x).logits, logits)
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


@pytest.mark.parametrize(
    ("scheme", "knee", "searched"),
    [("qk_norm", "auto", True), ("qk_norm", 0, False), ("qkv_norm", None, False), ("soft_cap", None, False)],
)
def test_the_knee_is_searched_by_default_where_it_can_be(scheme, knee, searched):
    model = patch_model(tiny_model("llama", initializer_range=0.3), scheme)
    report = calibrate(model, batches(8), knee=knee)
    assert report.knee == knee_of(model)
    assert report.sharpness == (8 if searched else 1)
    assert bool(report.knees) == searched == (report.knee > 0)


@pytest.mark.parametrize(
    ("scheme", "options", "error"),
    [
        ("qk_norm", {"knee": "best"}, "knee='best': expected a number ≥ 0, \"auto\", or None"),
        ("qk_norm", {"knee": -1}, "knee=-1: expected a number ≥ 0"),
        ("qk_norm", {"knee": math.nan}, "knee=nan: expected a number ≥ 0"),
        ("qk_norm", {"exportable": True, "knee": "auto"}, "knee=auto is not exportable"),
        ("qk_norm", {"sharpness": 0.5}, "sharpness=0.5: expected a number ≥ 1"),
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
    with pytest.raises(ValueError, match=r"the knee 32 costs nan nats per token, expected a finite number"):
        calibrate(model, batches(2))
    with pytest.raises(ValueError, match=r"the loss rises by nan nats \(nan to nan\), more than max_loss_increase=1"):
        calibrate(model, batches(2), knee=4, max_loss_increase=1)
