"""The numbers in a model card are those of the calibration report."""

from __future__ import annotations

import math

from hf_qknorm import Scheme
from hf_qknorm.convert.card import render_card
from hf_qknorm.reports.records import Prediction
from qknorm_tests.card_cases import checkpoint, edit, front


def test_a_card_warns_of_text_that_is_shorter_than_the_context(tmp_path):
    report = edit(checkpoint(tmp_path), context=2048)
    assert report.length == 20
    text = render_card(tmp_path)
    assert "tokens in sequences of up to 20" in text
    warning = "**Long context was not measured**: the text was in sequences of up to 20 tokens, and the model's context"
    assert f"{warning} has 2,048." in text
    assert "2,048. Later positions" in text
    edit(tmp_path, context=20)
    assert "Long context" not in render_card(tmp_path)
    edit(tmp_path, length=None, context=None)  # a report of version 0.1
    assert "sequences of up to" not in render_card(tmp_path)


def test_a_card_has_the_numbers_of_the_report(tmp_path):
    checkpoint(tmp_path)
    edit(
        tmp_path,
        base=Prediction(1.476),
        ones=Prediction(2.41, 0.8, 0.6),
        chosen=Prediction(1.5312, 0.05, 0.925),
        tokens=262_144,
        judged=16_384,
    )
    text = render_card(tmp_path)
    results = front(text)["model-index"][0]["results"]
    assert [(m["name"], m["value"]) for m in results[0]["metrics"]] == [
        ("loss, converted", 1.5312),
        ("perplexity, converted", round(math.exp(1.5312), 4)),
        ("loss, unpatched", 1.476),
        ("perplexity, unpatched", round(math.exp(1.476), 4)),
    ]
    for line in (
        "| unpatched | 1.476 | 4.38 | 0.0000 | 100.0% |",
        "| fresh gains | 2.410 | 11.13 | 0.8000 | 60.0% |",
        "| this model | 1.531 | 4.62 | 0.0500 | 92.5% |",
        "its loss is **1.531** nats per token; that of the unpatched model is **1.476**",
        "is 0.055 nats per token above the unpatched model's, and for 7.5% of the tokens",
        "on 16,384 tokens of the calibration text",
        "Calibrated on 262,144 tokens",
    ):
        assert line in text


def test_a_card_has_knee_and_bound(tmp_path):
    checkpoint(tmp_path, Scheme(q="rms", k="lp", p=3.0, softcap=50.0), knee=4.0)
    report = edit(tmp_path, knee=4.0, knees={2.0: Prediction(1.5), 4.0: Prediction(1.482)})
    text = render_card(tmp_path)
    largest = [max(max(getattr(x, side).max_logit) for x in report.layers.values()) for side in ("before", "after")]
    for line in (
        "# Llama with QK norm (knee 4) and a logit cap",
        f"No input gives an attention logit over **{report.bound:.1f}** before the cap, up to rounding.",
        "have a **knee** of 4: their ε",
        "4 times the mean |x|ᵖ of calibration text",
        "; loss by knee: 2: 1.500; 4: 1.482.",
        f"The bound of {report.bound:.1f} holds for any input",
        f"before any cap is {largest[1]:.1f}, and {largest[0]:.1f} in the unpatched model.",
    ):
        assert line in text
