"""The numbers in a model card are those of the calibration report."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from hf_qknorm import Calibration, Scheme
from hf_qknorm.hub.card import render_card
from hf_qknorm.reports.records import Prediction
from qknorm_tests.card_cases import REPORT, checkpoint, edit, front


@pytest.mark.parametrize("method", ["moments", "measured"])
def test_a_card_warns_of_text_that_is_shorter_than_the_context(tmp_path, method):
    report = edit(checkpoint(tmp_path), context=2048)
    assert report.length == 20
    if method == "measured":
        alone = {name: dataclasses.replace(layer, before=None) for name, layer in report.layers.items()}
        edit(tmp_path, method=method, base=None, ones=None, layers=alone, knees={})
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
    report = edit(
        tmp_path,
        base=Prediction(1.476),
        ones=Prediction(2.41, 0.8, 0.6),
        chosen=Prediction(1.5312, 0.05, 0.925),
        method="fit",  # of earlier versions
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
        "| **this model** | 1.531 | 4.62 | 0.0500 | 92.5% |",
        "the calibration removed 94.1%",
        "lost 0.055 nats per token, and for 7.5% of the tokens",
        "on 16,384 tokens of the calibration text itself, held out from the steps of the fit",
        "by the method `fit` on 262,144 tokens",
    ):
        assert line in text
    for name, layer in report.layers.items():
        row = next(line for line in text.splitlines() if line.startswith("| " + name.replace("_", r"\_")))
        assert f"{max(layer.before.max_logit):.1f} → {max(layer.after.max_logit):.1f}" in row


@pytest.mark.parametrize(
    ("method", "judged", "clause"),
    [
        (
            "fit",
            40,
            "held out from the steps of the fit, though two of its batches chose the step that was kept. On",
        ),
        ("fit_qk", 120, "text itself, which also set the gains. On"),
        ("moments", 40, "text itself, which also set the gains. On"),
        ("ones", 40, "text itself. On"),
        ("fit", None, "on a few batches of the calibration text itself. On"),
    ],
)
def test_a_card_states_the_text_that_judged_the_model(tmp_path, method, judged, clause):
    edit(checkpoint(tmp_path), method=method, judged=judged, tokens=120)
    text = render_card(tmp_path)
    assert clause in text
    assert f"by the method `{method}`" in text


def test_a_card_names_sharp_norms(tmp_path):
    checkpoint(tmp_path, Scheme(q="rms", k="rms", knee=3.0, sharpness=8))
    text = render_card(tmp_path)
    assert "with sharp QK norm (knee 3)" in text
    assert "They have a **sharpness** of 8: with m the mean square, they divide by a root of (ε^8 + m^8)^(1/8)" in text


def test_a_card_has_knee_and_bound(tmp_path):
    checkpoint(tmp_path, Scheme(q="rms", k="lp", p=3.0, softcap=50.0, knee=4.0))
    report = edit(tmp_path, knees={2.0: Prediction(1.5), 4.0: Prediction(1.482)})
    text = render_card(tmp_path)
    largest = [max(max(getattr(x, side).max_logit) for x in report.layers.values()) for side in ("before", "after")]
    for line in (
        "# Llama with QK norm (knee 4) and a logit cap",
        f"No input gives an attention logit over **{report.bound:.1f}**, before the cap.",
        "have a **knee** of 4: their ε",
        "4 times the mean |x|ᵖ of calibration text",
        "(loss by knee: 2: 1.500; 4: 1.482)",
        "| layer | largest \\|logit\\| | bound | beyond the knee: q, k |",
        "by Cauchy–Schwarz a logit is at most scale·‖q‖·‖k‖",
        f"The largest logits ({largest[0]:.1f} unpatched, {largest[1]:.1f} now) are those seen on that text",
    ):
        assert line in text
    for name, layer in report.layers.items():
        row = next(line for line in text.splitlines() if line.startswith("| " + name.replace("_", r"\_")))
        shares = [f"{sum(share) / len(share):.2%}" for share in (layer.after.beyond_q, layer.after.beyond_k)]
        assert f"| {layer.bound:.1f} | {', '.join(shares)} |" in row


def test_without_both_norms_a_card_has_no_bound(tmp_path):
    text = render_card(checkpoint(tmp_path, "q_norm"))
    assert "No input gives" not in text
    assert "Cauchy" not in text
    assert "and no bound." in text


def test_the_table_has_the_worst_layers_only(tmp_path):
    checkpoint(tmp_path)
    layer = next(iter(Calibration.load(tmp_path / REPORT).layers.values()))
    worse = {
        f"layers.{i}": dataclasses.replace(layer, after=dataclasses.replace(layer.after, max_logit=(float(i),)))
        for i in range(30)
    }
    edit(tmp_path, layers=worse)
    text = render_card(tmp_path)
    assert "The 8 of 30 layers with the largest logits" in text
    assert re.findall(r"^\| (layers\.\d+)", text, re.MULTILINE) == [f"layers.{i}" for i in range(29, 21, -1)]
