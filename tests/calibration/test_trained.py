"""Conversions of trained models keep the loss: of a small one trained here, and of the shared checkpoints."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_qknorm import Scheme, calibrate, patch_model
from hf_qknorm.measure.text import load_text, sample_batches, tokenize
from hf_qknorm.small_model import byte_tokenizer, mean_loss, train
from qknorm_tests.seeds import fixed
from qknorm_tests.tiny import tiny_model

QK = {"q": "auto", "k": "auto"}
GAINS = {
    "shared": Scheme(**QK),
    "per head": Scheme(**QK, gain="per_head"),
}
MOMENTS, TOKENS = 24, 10  # batches: the closed form needs no more, a knee not even 20,000 tokens


@pytest.fixture(scope="module")
def small() -> tuple[PreTrainedModel, dict[str, list[Tensor]]]:
    """Train a tiny Llama on sums for some seconds; return it with batches of that text, which no version changes."""
    numbers = random.Random(0)
    pairs = ((numbers.randrange(1000), numbers.randrange(1000)) for _ in range(24_000))
    ids = tokenize(byte_tokenizer(), "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs))
    cut = int(len(ids) * 0.9)
    batches = {
        "training": sample_batches(ids[:cut], 250, 8, 64, seed=1),
        "calibration": sample_batches(ids[:cut], 32, 8, 64, seed=2),
        "continued": sample_batches(ids[:cut], 60, 8, 64, seed=3),
        "held out": sample_batches(ids[cut:], 8, 8, 64, seed=4),
    }
    torch.manual_seed(0)
    model = tiny_model("llama", vocab_size=257, initializer_range=0.1)
    train(model, batches["training"], rate=1e-2, warmup=20, decay=True)
    return model.eval(), batches


@pytest.mark.costly
def test_a_conversion_removes_most_of_the_jump(small):
    base, batches = small
    before = mean_loss(base, batches["held out"])
    fresh = mean_loss(patch_model(copy.deepcopy(base), GAINS["per head"]), batches["held out"])
    assert fresh > before + 0.05, "fresh gains raise the loss, or there is nothing to keep"
    losses = {}
    for method in ("moments", None):
        model = patch_model(copy.deepcopy(base), GAINS["per head"])
        report = calibrate(model, batches["calibration"], method=method)
        losses[method] = mean_loss(model, batches["held out"])
        assert report.loss - report.base_loss == pytest.approx(losses[method] - before, abs=0.05)
    assert fresh > losses["moments"] > losses[None]
    assert report.knee > 0
    assert fresh - losses[None] > 0.95 * (fresh - before)


class Trained:
    """A shared trained checkpoint, and batches of its text."""

    def __init__(self, shared: Any, family: str) -> None:
        folder = shared / "checkpoints" / f"{family}-shakespeare"
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        text = load_text(str(shared / "data" / "tinyshakespeare.txt"))
        cut = int(len(text) * 0.9)
        seen, held_out = tokenize(tokenizer, text[:cut]), tokenize(tokenizer, text[cut:])
        self.calibration = sample_batches(seen, MOMENTS, 8, 256, seed=fixed(1))
        self.held_out = sample_batches(held_out, 6, 8, 256, seed=fixed(0))


BASES = {"llama": (1.618, 2.599), "gpt2": (1.614, 2.083)}  # held-out loss before, and with fresh gains of RMS norms
# The share of the jump that each method must remove. None searches.
GATES = {
    ("llama", "shared", None): 0.98,
    ("gpt2", "shared", None): 0.98,
    ("gpt2", "per head", "moments"): 0.59,
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "gains", "method"), GATES)
def test_how_much_of_the_jump_is_removed(shared, caplog, family, gains, method):
    trained = Trained(shared, family)
    base, fresh = BASES[family]
    assert mean_loss(trained.model, trained.held_out) == pytest.approx(base, abs=1e-3)
    with caplog.at_level(logging.WARNING, "hf_qknorm"):
        patch_model(trained.model, GAINS[gains])
    assert "calibrate(model, texts) restores it" in caplog.text
    assert mean_loss(trained.model, trained.held_out) == pytest.approx(fresh, abs=1e-3)
    data = trained.calibration if method else trained.calibration[:TOKENS]
    report = calibrate(trained.model, data, method=method)
    assert f"{report.kept:.1%} of the jump removed" in str(report)
    removed = (fresh - mean_loss(trained.model, trained.held_out)) / (fresh - base)
    assert removed >= GATES[family, gains, method]
    assert removed == pytest.approx(report.kept, abs=0.05)
