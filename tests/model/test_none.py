"""The scheme "none" leaves no trace: a model that is patched with it saves as its base type."""

from __future__ import annotations

import copy
import json

import pytest
from transformers import AutoModelForCausalLM

from hf_qknorm import (
    SCHEMES,
    calibrate,
    patch_model,
    unpatch_model,
)
from hf_qknorm.model.derived import QKNormModel, derived_config
from hf_qknorm.standalone.generate import add_standalone
from qknorm_tests.folders import contents
from qknorm_tests.tables import MODEL_TYPES, make_batch, sharp_model
from qknorm_tests.tiny import TINY


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_files_are_those_of_the_unpatched_model(model_type, tmp_path):
    model = sharp_model(model_type)
    model.save_pretrained(tmp_path / "unpatched")
    patch_model(model, "none")
    calibrate(model, [make_batch("plain", labels=False)])
    model.save_pretrained(tmp_path / "patched")
    model.config.save_pretrained(tmp_path / "config")
    copy.deepcopy(model).save_pretrained(tmp_path / "copy")
    expected = contents(tmp_path / "unpatched")
    assert contents(tmp_path / "patched") == contents(tmp_path / "copy") == expected
    assert contents(tmp_path / "config") == {"config.json": expected["config.json"]}
    assert isinstance(model, QKNormModel)  # for LogitMonitor and QKClip
    assert model.config.scheme == SCHEMES["none"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert type(again) is type(unpatch_model(model))


def test_it_needs_no_code():
    with pytest.raises(ValueError, match="saves as a plain llama: that needs no code"):
        add_standalone(patch_model(sharp_model("llama"), "none"))


def test_a_stored_none_stays_stored(tmp_path):
    """It was converted so: a checkpoint keeps the type that it was loaded with."""
    stored = AutoModelForCausalLM.from_config(derived_config("llama")(**TINY, qk_norm="none"))
    stored.save_pretrained(tmp_path / "first")
    AutoModelForCausalLM.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert json.loads((tmp_path / "first" / "config.json").read_text())["model_type"] == "qknorm_llama"
    assert contents(tmp_path / "second") == contents(tmp_path / "first")
