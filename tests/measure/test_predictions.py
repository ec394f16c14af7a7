"""Predictions over batches, against the plain formulas."""

import pytest
import torch

from hf_qknorm import patch_model
from hf_qknorm.measure.predictions import predictions
from hf_qknorm.model.install import as_unpatched
from qknorm_tests.tables import BATCHES, make_batch, randomise, real, sharp_model


def batch_of(kind):
    """One of the tables' batches in the form of calibration data."""
    return {key: value for key, value in make_batch(kind).items() if key in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("kind", [kind for kind in BATCHES if kind != "packed"])
def test_predictions_equal_the_formulas(kind):
    model = randomise(patch_model(sharp_model("llama"), "qk_norm_cap"))
    batch = batch_of(kind)
    with torch.no_grad():
        own = model(**batch).logits.double()
        with as_unpatched(model):
            base = model(**batch).logits.double()
    p, q, keep = base.log_softmax(-1), own.log_softmax(-1), real(batch)
    losses, total = {"base": 0.0, "own": 0.0}, 0
    for row in range(2):
        ids, logs = batch["input_ids"][row], {"base": p[row], "own": q[row]}
        for t in range(len(ids) - 1):
            if keep[row, t] and keep[row, t + 1]:
                total += 1
                for name in losses:
                    losses[name] -= float(logs[name][t, ids[t + 1]])
    got_base, got = predictions(model, [batch])
    assert got_base.loss == pytest.approx(losses["base"] / total, rel=1e-5)
    assert got.loss == pytest.approx(losses["own"] / total, rel=1e-5)
    assert got.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1)[keep].mean()), rel=1e-4)
    assert got.agreement == pytest.approx(float((base.argmax(-1) == own.argmax(-1))[keep].double().mean()))
    assert 0 < got.agreement < 1
    assert (got_base.kl, got_base.agreement) == (0, 1)
    if kind == "plain":
        with torch.no_grad():
            assert got.loss == pytest.approx(float(model(**batch, labels=batch["input_ids"]).loss), rel=1e-5)


def test_predictions_without_a_change_a_head_or_a_target():
    assert predictions(patch_model(sharp_model("gpt2"), "none"), [batch_of("plain")])[1].kl == 0
    assert predictions(patch_model(sharp_model("gpt2").base_model, "qk_norm"), [batch_of("plain")]) == (None, None)
    with pytest.raises(ValueError, match="no token of the data has a successor"):
        predictions(patch_model(sharp_model("gpt2"), "none"), [{"input_ids": torch.ones(2, 1, dtype=torch.long)}])
