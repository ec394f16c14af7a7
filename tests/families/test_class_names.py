"""The Auto class of the base loads the patched model; `pytest --all-families` runs every pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from hf_qknorm import FAMILIES, Scheme, patch_model, unpatch_model
from hf_qknorm.families import known_families
from hf_qknorm.families.class_names import AUTO_CLASSES
from qknorm_tests.tables import fingerprint, make_batch, randomise
from qknorm_tests.tiny import TINY, tiny_config

NORMED, CAPPED = Scheme(q="rms", k="rms", softcap=5.0), Scheme(softcap=5.0)
PAIRS = [(auto, t) for auto, names in AUTO_CLASSES.items() for t in known_families() if t in names]
FEW = {auto: (auto, t) for auto, t in reversed(PAIRS)}  # the first family of each Auto class
IMAGES = ("clip_vision_model", "deit", "ijepa", "siglip_vision_model", "vit", "vit_msn")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pair" in metafunc.fixturenames:
        pairs = PAIRS if metafunc.config.getoption("--all-families") else list(FEW.values())
        metafunc.parametrize("pair", pairs, ids="-".join)


def tiny(auto: str, model_type: str) -> PreTrainedModel:
    encoder = FAMILIES[model_type].causal == "is_decoder" and auto != "AutoModelForCausalLM"
    settings: dict[str, Any] = {"is_decoder": False} if encoder else {}
    if auto == "AutoModelForMaskedImageModeling":
        settings["encoder_stride"] = 4
    if isinstance(classes := AUTO_CLASSES[auto][model_type], tuple):  # transformers picks by `architectures`
        settings["architectures"] = [classes[0]]
    torch.manual_seed(0)
    config = tiny_config(model_type, **settings)
    if auto != "AutoModelForCausalLM" and model_type == "bigbird_pegasus":
        pytest.skip("its encoder can't be patched")
    return getattr(transformers, auto).from_config(config).eval()


def batch_for(auto: str, model_type: str) -> dict[str, Any]:
    if model_type in IMAGES:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    if model_type == "whisper" and auto != "AutoModelForCausalLM":
        sound = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
        target = {} if auto == "AutoModelForAudioClassification" else {"decoder_input_ids": torch.ones(2, 3).long()}
        return {"input_features": sound} | target
    tokens = make_batch("plain", labels=False)
    across = FAMILIES[model_type].style.project_across is not None
    if across and auto == "AutoModelForSequenceClassification":
        tokens["input_ids"][:, -1] = TINY["eos_token_id"]
    if across and auto in ("AutoModel", "AutoModelForPreTraining", "AutoModelForSeq2SeqLM"):
        tokens["decoder_input_ids"] = tokens["input_ids"][:, :9]
    if auto == "AutoModelForMultipleChoice":
        tokens = {name: value[None] for name, value in tokens.items()}
    return tokens


@torch.no_grad()
def test_it_is_unpatched_and_loads_what_was_saved(pair: tuple[str, str], tmp_path: Path) -> None:
    auto, model_type = pair
    model = tiny(auto, model_type)
    scheme = CAPPED if FAMILIES[model_type].refusal(model.config, NORMED) else NORMED
    before = fingerprint(model)
    assert fingerprint(unpatch_model(patch_model(model, scheme))) == before
    randomise(patch_model(model, scheme)).save_pretrained(tmp_path)
    again = getattr(transformers, auto).from_pretrained(tmp_path)
    assert type(again) is type(model)
    batch = batch_for(auto, model_type)
    expected = model(**batch, return_dict=True).to_tuple()
    for got, wanted in zip(again(**batch, return_dict=True).to_tuple(), expected, strict=True):
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_the_table_is_that_of_transformers() -> None:
    """Classes that a hand-written list once missed, and a composite model that belongs to no family."""
    assert {"AutoModelForPreTraining", "AutoModelForTextEncoding", "AutoModelForNextSentencePrediction"} <= set(FEW)
    assert "AutoModelForDecision" not in AUTO_CLASSES
