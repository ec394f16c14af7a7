"""The advice, and the order of the layers, for given measurements."""

from __future__ import annotations

import dataclasses

import pytest

from hf_qknorm import SCHEMES, Scheme
from hf_qknorm.inspection.advice import advise, cap_loss, knee_scheme, wide_cap
from hf_qknorm.inspection.report import Inspection, KneeTrial, KneeTrials
from hf_qknorm.reports.records import LayerStatistics, Prediction

CHEAP, DEAR = Prediction(1.4, 0.001, 0.99), Prediction(1.9, 0.4, 0.7)
NORMED = Scheme(q="rms", k="rms")
TRIALS = tuple(
    KneeTrial(knee, rise, rise / 2, 40 * (1 + knee))
    for knee, rise in ((0.0, 0.4), (1.0, 0.08), (2.0, 0.010), (4.0, 0.007), (8.0, 0.002))
)
KEPT = KneeTrials(SCHEMES["qk_norm_cap"], 1.1, 0.011, TRIALS)
LOST = KneeTrials(SCHEMES["qk_norm_cap"], 0.3, 0.005, TRIALS[:4])


def layer(*logits: float, entropy: float = 3.0) -> LayerStatistics:
    """A layer whose heads have these largest logits."""
    n = len(logits)
    return LayerStatistics(logits, (entropy,) * n, (0.0,) * n, (0.0,) * n, (1.0,) * n, (1.0,), even=4.5)


def inspection(layers: dict[str, LayerStatistics], **known) -> Inspection:
    """The inspection of a model with these layers."""
    return Inspection("tiny", "llama", 4096, 256, **{"cap": 50.0, "layers": layers, **known})


def measurements(largest: float, *, bound: float | None = None, **known) -> Inspection:
    """The inspection of a model of two layers with this largest |logit|, and this bound."""
    layers = {"calm": layer(1.0, 2.0), "worst": layer(1.0, largest)}
    return inspection({name: dataclasses.replace(x, bound=bound) for name, x in layers.items()}, **known)


@pytest.mark.parametrize("logit", [1.0, 28.6, 28.7, 50.0, 77.0, 1e4])
def test_the_wide_cap_is_the_smallest_that_takes_at_most_a_tenth(logit):
    cap = wide_cap(logit, 50.0)
    assert cap_loss(logit, cap) <= 0.1
    assert cap == 50 or cap_loss(logit, cap - 10) > 0.1


def test_layers_are_ranked_by_their_largest_logit():
    layers = {f"layer.{i}": layer(1.0, x) for i, x in enumerate((10.0, 26.0, 120.0, 51.0))}
    layers["layer.1"] = dataclasses.replace(layers["layer.1"], entropy=(0.1, 0.4))
    risks = inspection(layers).risks
    assert [(r.layer, r.level) for r in risks] == [
        ("layer.2", "runaway"), ("layer.3", "large"), ("layer.1", "raised"), ("layer.0", "calm")
    ]  # fmt: skip
    assert [(r.max_logit, r.max_head) for r in risks][0] == (120.0, 1)
    # head 0 has a lower entropy, but small logits: that is no collapse
    assert (risks[2].collapsed, risks[2].entropy, risks[2].entropy_head) == ((1,), 0.1, 0)
    assert not any(risk.collapsed for risk in risks if risk.layer != "layer.1")


@pytest.mark.parametrize(("entropy", "named"), [(0.44, True), (0.46, False)])
def test_collapsed_heads_are_counted_in_the_reasons(entropy, named):
    layers = {"layer": layer(30.0, entropy=entropy)}
    reasons = advise(inspection(layers)).reasons
    assert any("hardly more than one token" in reason for reason in reasons) == named


CASES = {
    # name: (measurements, the advised scheme, a part of a reason)
    "large": (measurements(80.0), "Scheme(softcap=140.0)", "a cap of 140 bends the largest logit by no more than 10%"),
    "runaway": (measurements(101.0), "qk_norm", "a cap of 50 would bend the largest logit by 52%"),
    "large, and 50 is measured to cost much": (
        measurements(80.0, trials={Scheme(softcap=50.0): DEAR, Scheme(softcap=140.0): CHEAP}),
        "Scheme(softcap=140.0)",
        "measured, it costs a KL of 0.001",
    ),
    "large, and every cap costs much": (
        measurements(80.0, trials={Scheme(softcap=50.0): DEAR, Scheme(softcap=140.0): DEAR}),
        "qk_norm",
        "measured: a KL of 0.4",
    ),
    "runaway in logits that do not matter to predictions": (
        measurements(500.0, trials={Scheme(softcap=50.0): CHEAP}),
        "soft_cap",
        "measured, it costs a KL of 0.001",
    ),
    "a knee keeps the loss": (
        measurements(80.0, knees=KEPT, trials={Scheme(softcap=50.0): CHEAP}),
        "qk_norm_cap",
        "finds gains and a knee of 4 for this scheme: the loss changes by +0.007 nats, with a KL of 0.004 (allowed: "
        "0.011; fresh gains and no knee: 1.100), and no input can give a |logit| over 200",
    ),
    "no knee keeps the loss": (
        measurements(300.0, knees=LOST),
        "qk_norm",
        "norms with a knee cost more than the 0.005 nats that calibrate() allows: 0.007 with a knee of 4",
    ),
    "q_norm already": (
        measurements(300.0, scheme=Scheme(q="rms")),
        "Scheme(q='rms', k='auto')",
        "a cap of 50 would bend the largest logit",
    ),
    "Qwen3": (
        measurements(12.0, normed=True),
        "none",
        "a cap of 50 would bend the largest logit by 1.9%: nothing need be added",
    ),
    "Qwen3, with gains that allow large logits": (
        measurements(12.0, normed=True, bound=900.0),
        "none",
        "the gains allow far more than was seen: watch them and the logits with LogitMonitor",
    ),
    "Qwen3 with large gains": (
        measurements(60.0, normed=True, bound=300.0),
        "Scheme(softcap=110.0)",
        "in proportion to their gains (to at most 300 for any input), and these gains allow large ones",
    ),
    "patched with norms of large gains": (
        measurements(60.0, scheme=NORMED, normed=True),
        "Scheme(q='rms', k='rms', softcap=110.0)",
        "if the gains grow in training, decay or clip them",
    ),
    "DeepSeek V3": (
        measurements(20.0, latent=True, knees=KEPT),
        "qk_norm_cap",
        "a server has to cache one number more for each token and head",
    ),
    "no knee and no cap suits the model": (
        measurements(300.0, knees=LOST),
        "qk_norm",
        "calibrate() removes most of that cost, with a knee nearly all of it: vectors below the knee keep their length",
    ),
    "Gemma 2": (
        measurements(90.0, own_cap=50.0),
        "none",
        "its cap of 50 bends the largest logit by 47%, and bounds larger ones too",
    ),
    "Gemma 2, saturated": (measurements(150.0, own_cap=50.0), "qk_norm", "passes 1.0% of the gradient"),
    "capped and normed, saturated": (
        measurements(150.0, own_cap=50.0, normed=True, scheme=dataclasses.replace(NORMED, softcap=50.0)),
        "Scheme(q='rms', k='rms', softcap=260.0)",
        "a cap of 260 bends it by 10%",
    ),
}


@pytest.mark.parametrize(("known", "name", "reason"), CASES.values(), ids=CASES)
def test_the_scheme_and_its_reason(known, name, reason):
    advice = advise(known)
    assert advice.name == name
    assert any(reason in text for text in advice.reasons), advice.reasons
    assert f"the largest |logit| is {known.largest:.1f} (worst, head 1)" in advice.reasons


@pytest.mark.parametrize(
    ("queries", "both", "harmful"), [(0.05, 1.1, True), (0.5, 0.6, False)]
)  # only a measured cost blames the keys
def test_the_norm_of_the_keys_is_called_damaging_where_that_was_measured(queries, both, harmful):
    trials = {SCHEMES["q_norm"]: Prediction(1.5, queries, 0.9), SCHEMES["qk_norm"]: Prediction(2.5, both, 0.5)}
    (reason,) = [text for text in advise(measurements(300.0, trials=trials)).reasons if "measured with fresh" in text]
    assert ("the keys' norm is the damaging half" in reason) == harmful
    assert f"{queries:.2g}" in reason
    unmeasured = advise(measurements(300.0)).reasons
    assert any("q_norm costs less" in text for text in unmeasured)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"own_cap": 50.0}, SCHEMES["qk_norm"]),
        ({}, dataclasses.replace(SCHEMES["qk_norm_cap"], softcap=140.0)),
        ({"trials": {Scheme(softcap=50.0): CHEAP}}, SCHEMES["qk_norm_cap"]),
        ({"trials": {Scheme(softcap=50.0): DEAR}}, dataclasses.replace(SCHEMES["qk_norm_cap"], softcap=140.0)),
    ],
)
def test_knees_are_tried_with_a_harmless_cap(known, expected):
    assert knee_scheme(measurements(80.0, **known)) == expected


def test_the_chosen_knee_has_a_margin_over_the_smallest_within_the_limit():
    assert KEPT.chosen == TRIALS[3]
    assert LOST.chosen is None
    assert KEPT.to_dict()["chosen"] == 4
    assert KEPT.to_dict()["trials"][0] == {"knee": 0.0, "rise": 0.4, "kl": 0.2, "bound": 40.0}
