"""Decoders whose input is more than tokens: the codebooks of MusicGen, with a text to attend to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MoshiForConditionalGeneration, PreTrainedModel

from hf_qknorm import SCHEMES, patch_model, unpatch_model
from hf_qknorm.families.style import CACHE
from hf_qknorm.model.attention import patched_layers
from qknorm_tests.error_budget import error
from qknorm_tests.tables import (
    OWN_INPUTS,
    assert_backends_agree,
    assert_identical,
    assert_near,
    fingerprint,
    randomise,
    sharp_model,
    step,
    use_backend,
)
from qknorm_tests.tiny import tiny_config

TOLERANCE = 1e-4
BATCH, LENGTH, BOOKS = 2, 12, 2


def made(model_type: str) -> PreTrainedModel:
    return sharp_model(model_type, attention_dropout=0.1)


def batch_for(model_type: str, *, labels: bool = True) -> dict[str, Any]:
    """Tokens of which the first row is padded at the left, and the model's other inputs."""
    generator = torch.Generator().manual_seed(0)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(3, 64, shape, generator=generator)

    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, :4] = 0
    states = torch.randn(BATCH, 7, 64, generator=generator)
    seen = torch.ones(BATCH, 7, dtype=torch.long)
    seen[1, 5:] = 0
    batch = {"input_ids": tokens(BATCH * BOOKS, LENGTH), "encoder_hidden_states": states}
    if model_type == "musicgen_decoder":  # the other puts the states in front of its input, and its steps mask neither
        batch |= {"attention_mask": mask, "encoder_attention_mask": seen}
    return batch | ({"labels": tokens(BATCH, LENGTH, BOOKS)} if labels else {})


@torch.no_grad()
def in_steps(model: PreTrainedModel, batch: dict[str, Any], first: int = 8) -> Tensor:
    """The logits of the tokens after the `first`, each computed by itself with the cache of those before."""
    others = {name: x for name, x in batch.items() if name not in ("input_ids", "attention_mask", "labels")}
    cache, found = None, []
    for start, stop in [(0, first), *((n, n + 1) for n in range(first, LENGTH))]:
        inputs = {"input_ids": batch["input_ids"][:, start:stop]}
        if "attention_mask" in batch:
            inputs["attention_mask"] = batch["attention_mask"][:, :stop]
        if start == 0 or model.config.model_type.endswith("musicgen_decoder"):  # others have them in the cache
            inputs |= others
        out = model(**inputs, **{CACHE: cache}, use_cache=True)
        cache = out[CACHE]
        found.append(out.logits[:, -1])
    return torch.stack(found[1:], 1)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", OWN_INPUTS)
def test_none_changes_nothing(model_type, backend):
    original, patched = made(model_type), made(model_type)
    use_backend(backend, original, patched)
    before = fingerprint(patched)
    patch_model(patched, "none")
    assert patched_layers(patched)
    expected = step(original, batch_for(model_type))
    assert torch.isfinite(expected["loss"])
    assert_identical(step(patched, batch_for(model_type)), expected)
    batch = batch_for(model_type, labels=False)
    assert torch.equal(in_steps(patched, batch), in_steps(original, batch))
    assert fingerprint(unpatch_model(patched)) == before


@pytest.mark.parametrize("model_type", OWN_INPUTS)
def test_norm_and_cap(model_type, tmp_path: Path):
    """Every new parameter trains; the steps of a generation are those of the whole text; it saves and loads."""
    model, batch = made(model_type), batch_for(model_type)
    expected = step(model, batch)
    randomise(patch_model(model, replace(SCHEMES["qk_norm_cap"], softcap=2.0)), knee=4.0)
    result = step(model, batch)
    added = result.keys() - expected.keys()
    assert added
    assert all(result[name].abs().max() > 0 for name in added)
    assert error(result["logits"], expected["logits"]) > 1e-3

    with torch.no_grad():
        whole = model(**batch).logits
        assert_near(in_steps(model, batch), whole[:, 8 - LENGTH :], TOLERANCE)
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert_near(again(**batch).logits, whole, 1e-6)


@pytest.mark.parametrize("model_type", OWN_INPUTS)
def test_backends_agree(model_type):
    model, batch = made(model_type), batch_for(model_type, labels=False)
    real = batch.get("attention_mask", torch.ones(BATCH, LENGTH)).bool()
    rows = real.repeat_interleave(BOOKS, 0)
    assert_backends_agree(model, lambda: model(**batch).logits[:, -LENGTH:][rows], TOLERANCE)


def test_a_model_with_layers_of_two_configs_is_refused():
    """Moshi's depth decoder has the attention class of its decoder; the latter is patched by itself."""
    depth = {"num_codebooks": 2, "hidden_size": 32, "input_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    parts = {
        "audio_encoder_config": {"model_type": "mimi"},
        "depth_decoder_config": {**depth, "ffn_dim": 64, "audio_vocab_size": 16},
    }
    with torch.device("meta"):
        model = MoshiForConditionalGeneration(tiny_config("moshi", audio_vocab_size=16, **parts))
    before = fingerprint(model)
    with pytest.raises(ValueError, match=r"has a MoshiDepthConfig.*patch_model\(model.decoder"):
        patch_model(model, "qk_norm_cap")
    assert fingerprint(model) == before
    assert len(patched_layers(patch_model(model.decoder, "qk_norm_cap"))) == 2
