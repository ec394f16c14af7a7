"""`inspect_checkpoint`: inspections of checkpoints on the disk, and refusals in one line."""

import json

import pytest

from hf_qknorm import SCHEMES, patch_model
from hf_qknorm.calibration.knees import KNEES
from hf_qknorm.inspection.inspect import inspect_checkpoint
from hf_qknorm.inspection.report import Inspection
from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tables import sharp_model


@pytest.fixture
def checkpoint(tmp_path):
    """A small checkpoint with a tokenizer, and some text."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return save_with_tokenizer(sharp_model("llama", vocab_size=257), tmp_path / "checkpoint")


def test_a_checkpoint_is_inspected_on_a_text(checkpoint):
    text = checkpoint.parent / "text.txt"
    found = inspect_checkpoint(str(checkpoint), data=str(text), max_tokens=600)
    assert isinstance(found, Inspection)
    assert (found.tokens, found.length) == (512, 128)  # as far as its positions reach
    assert found.model == str(checkpoint)
    patch_model(sharp_model("llama", vocab_size=257), "qk_norm").save_pretrained(checkpoint)
    again = inspect_checkpoint(str(checkpoint), data=str(text), max_tokens=600)
    assert again.scheme == SCHEMES["qk_norm"].resolve()
    assert again.model_type == "qknorm_llama"


def test_missing_files_are_named_in_one_line(checkpoint):
    text = str(checkpoint.parent / "text.txt")
    with pytest.raises(OSError, match="anywhere is no folder here, and the download from the Hub failed") as error:
        inspect_checkpoint("no-such-model-anywhere", data=text)
    assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="config.json is missing: is this a checkpoint of transformers?"):
        inspect_checkpoint(str(checkpoint.parent), data=text)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    with pytest.raises(ValueError, match="bert has bidirectional attention"):
        inspect_checkpoint(str(checkpoint), data=text)
    (checkpoint / "config.json").write_text(json.dumps(config))
    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    with pytest.raises((OSError, ValueError), match=f"{checkpoint}: ") as error:
        inspect_checkpoint(str(checkpoint), data=text)
    assert "\n" not in str(error.value)
    assert "tokenizer" in str(error.value)


def test_the_advice_for_a_trained_model(shared):
    text = str(shared / "data" / "tinyshakespeare.txt")
    found = inspect_checkpoint(str(shared / "checkpoints" / "llama-shakespeare"), data=text, max_tokens=2048)
    assert found.advice.scheme == SCHEMES["qk_norm_cap"]
    assert found.ranked[0][0] == "model.layers.3.self_attn"
    assert found.largest > 50
    trials = found.trials
    assert trials["qk_norm"].kl > 10 * trials["q_norm"].kl > 100 * trials["soft_cap"].kl
    assert 0 < found.knee < KNEES[-1]
    assert f"a knee of {found.knee:.3g} costs" in " ".join(str(found).split())
