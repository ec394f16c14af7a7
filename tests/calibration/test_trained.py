"""Conversions of trained models keep the loss."""

import logging

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import Scheme, calibrate, patch_model
from hf_qknorm.measure.text import load_text, sample_batches, tokenize
from hf_qknorm.small_model import mean_loss
from qknorm_tests.seeds import fixed

BASES = {"llama": (1.618, 2.599), "gpt2": (1.614, 2.083)}  # held-out loss before, and with fresh gains of RMS norms
# The batches, and the share of the jump that each knee must remove. None searches: it needs not even 10,000 tokens.
GATES = [
    ("llama", "shared", None, 4, 0.98),
    ("gpt2", "shared", None, 10, 0.98),
    ("gpt2", "per_head", 0, 24, 0.59),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "gain", "knee", "count", "gate"), GATES)
def test_how_much_of_the_jump_is_removed(shared, caplog, family, gain, knee, count, gate):
    folder = shared / "checkpoints" / f"{family}-shakespeare"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    text = load_text(shared / "data" / "tinyshakespeare.txt")
    cut = int(len(text) * 0.9)
    seen, rest = tokenize(tokenizer, text[:cut]), tokenize(tokenizer, text[cut:])
    held_out = sample_batches(rest, 6, 8, 256, seed=fixed(0))
    base, fresh = BASES[family]
    assert mean_loss(model, held_out) == pytest.approx(base, abs=1e-3)
    with caplog.at_level(logging.WARNING, "hf_qknorm"):
        patch_model(model, Scheme(q="auto", k="auto", gain=gain))
    assert "calibrate(model, texts) restores it" in caplog.text
    assert mean_loss(model, held_out) == pytest.approx(fresh, abs=1e-3)
    report = calibrate(model, sample_batches(seen, count, 8, 256, seed=fixed(1)), knee=knee)
    removed = (fresh - mean_loss(model, held_out)) / (fresh - base)
    assert removed >= gate
    reported = (report.ones.loss - report.loss) / (report.ones.loss - report.base.loss)
    assert removed == pytest.approx(reported, abs=0.05)
