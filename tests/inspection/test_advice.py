"""The advice, and the order of the layers, for given measurements."""

import dataclasses

import pytest

from hf_qknorm import SCHEMES, Scheme
from hf_qknorm.inspection.advice import advise, cap_loss, knee_scheme, wide_cap
from hf_qknorm.reports.inspection import Inspection, scheme_name
from hf_qknorm.reports.records import LayerStatistics, Prediction

CHEAP, DEAR = Prediction(1.4, 0.001, 0.99), Prediction(1.9, 0.4, 0.7)
KNEES = {4.0: Prediction(1.407, 0.004, 0.97, bound=200.0)}
KEPT = {"knees": KNEES, "knee": 4.0, "knee_scheme": SCHEMES["qk_norm_cap"]}
LOST = {"knees": KNEES}


def layer(*logits: float, entropy: float = 3.0) -> LayerStatistics:
    """A layer whose heads have these largest logits."""
    n = len(logits)
    return LayerStatistics(logits, (entropy,) * n, (0.0,) * n, (0.0,) * n, even=4.5)


def inspection(layers: dict[str, LayerStatistics], **known) -> Inspection:
    """The inspection of a model with these layers."""
    return Inspection("tiny", "llama", 4096, 256, 50.0, layers, base=Prediction(1.4), **known)


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
    found = inspection({f"layer.{i}": layer(1.0, x) for i, x in enumerate((10.0, 26.0, 120.0, 51.0))})
    assert [name for name, _ in found.ranked] == ["layer.2", "layer.3", "layer.1", "layer.0"]
    rows = [line.split()[:4] for line in str(found).splitlines() if line.startswith("layer.")]
    assert [row[0] for row in rows] == [name for name, _ in found.ranked]
    assert [row[1] for row in rows] == ["runaway", "large", "raised", "calm"]
    assert rows[0][2:] == ["120.0", "3.00"]


CAPPED = {"soft_cap": CHEAP}
DEAR_CAPS = {"soft_cap": DEAR, "Scheme(softcap=140.0)": DEAR}
CASES = {
    # name: (measurements, the advised scheme, a part of a reason)
    "rule 1: Qwen3": (
        measurements(12.0, normed=True, bound=900.0),
        "none",
        "its norms bound them, at most 900 for any input: nothing need be added",
    ),
    "rule 1: Gemma 2": (measurements(90.0, own_cap=50.0), "none", "its cap of 50 bounds them: nothing need be added"),
    "rule 2: a knee keeps the loss": (
        measurements(80.0, **KEPT, trials=CAPPED),
        "qk_norm_cap",
        "a knee of 4 costs +0.007 nats (KL 0.004) and bounds |logit| by 200 for any input",
    ),
    "rule 2: DeepSeek V3": (
        measurements(20.0, latent=True, **KEPT),
        "qk_norm_cap",
        "a server with a latent cache must hold one number more for each token and head",
    ),
    "rule 3: large": (
        measurements(80.0),
        "Scheme(softcap=140.0)",
        "a cap of 140 bends the largest logit by 10%, and bounds later ones",
    ),
    "rule 3: 50 is measured to cost much": (
        measurements(80.0, trials=DEAR_CAPS | {"Scheme(softcap=140.0)": CHEAP}, **LOST),
        "Scheme(softcap=140.0)",
        "no knee was cheap enough, or none was tried; a cap needs no calibration",
    ),
    "rule 3: logits that do not matter to predictions": (measurements(500.0, trials=CAPPED), "soft_cap", "a cap of 50"),
    "rule 3: Qwen3 with large gains": (
        measurements(60.0, normed=True, bound=300.0),
        "Scheme(softcap=110.0)",
        "norms are there already; a cap needs no calibration",
    ),
    "rule 3: capped and normed, saturated": (
        measurements(150.0, own_cap=50.0, normed=True, scheme=Scheme(q="rms", k="rms", softcap=50.0)),
        "Scheme(q='rms', k='rms', softcap=260.0)",
        "a cap of 260 bends the largest logit by 10%",
    ),
    "rule 4: every cap and every knee costs much": (
        measurements(80.0, trials=DEAR_CAPS, **LOST),
        "qk_norm",
        "calibrate(max_loss_increase=...) keeps most of the loss",
    ),
    "rule 4: q_norm already": (
        measurements(80.0, scheme=Scheme(q="rms"), trials={
            "Scheme(q='rms', softcap=50.0)": DEAR, "Scheme(q='rms', softcap=140.0)": DEAR}),
        "Scheme(q='rms', k='auto')",
        "every cap that was tried changes predictions",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("known", "name", "reason"), CASES.values(), ids=CASES)
def test_four_rules_and_at_most_four_lines(known, name, reason):
    advice = advise(known)
    assert scheme_name(advice.scheme) == name
    assert 2 <= len(advice.reasons) <= 4
    assert all(len(line) <= 110 for line in advice.reasons)
    assert any(reason in text for text in advice.reasons), advice.reasons
    assert advice.reasons[0].startswith(f"the largest |logit| is {known.largest:.1f} (worst, head 1)")


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"own_cap": 50.0}, SCHEMES["qk_norm"]),
        ({}, dataclasses.replace(SCHEMES["qk_norm_cap"], softcap=140.0)),
        ({"trials": CAPPED}, SCHEMES["qk_norm_cap"]),
        ({"trials": DEAR_CAPS}, dataclasses.replace(SCHEMES["qk_norm_cap"], softcap=140.0)),
    ],
)
def test_knees_are_tried_with_a_harmless_cap(known, expected):
    assert knee_scheme(measurements(80.0, **known)) == expected
