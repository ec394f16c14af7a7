"""The scheme "none" leaves class, config and files of a model as they are: its attention layers can be watched."""

import copy
import json

import pytest
from transformers import AutoModelForCausalLM

from hf_qknorm import calibrate, patch_model, unpatch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.derived import derived_config
from qknorm_tests.folders import contents
from qknorm_tests.tables import MODEL_TYPES, fingerprint, make_batch, sharp_model
from qknorm_tests.tiny import TINY
from qknorm_tests.tiny_towers import tiny_towers


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_class_config_and_files_are_those_of_the_unpatched_model(model_type, tmp_path):
    model = sharp_model(model_type)
    model.save_pretrained(tmp_path / "unpatched")
    before, config, settings = fingerprint(model), model.config, dict(vars(model.config))
    patch_model(model, "none")
    assert patched_layers(model)
    assert (type(model), vars(model.config)) == (before[0], settings)
    assert all(getattr(module, "config", config) is config for module in model.modules())
    model.save_pretrained(tmp_path / "patched")
    copy.deepcopy(model).save_pretrained(tmp_path / "copy")
    assert contents(tmp_path / "patched") == contents(tmp_path / "copy") == contents(tmp_path / "unpatched")
    with pytest.raises(ValueError, match=r"patched already \(.*\): call unpatch_model"):
        patch_model(model, "soft_cap")
    assert fingerprint(unpatch_model(model)) == before


def test_backends_of_towers_are_restored():
    model = tiny_towers("llava")
    config, before = model.config, model.config.text_config._attn_implementation
    patch_model(model, "none", attn_implementation="hf_qknorm")
    assert model.config is config
    assert config.text_config._attn_implementation == "hf_qknorm" != before
    assert unpatch_model(model).config.text_config._attn_implementation == before
    assert not patched_layers(model)


def test_there_is_nothing_to_calibrate():
    with pytest.raises(ValueError, match="is not patched with a scheme"):
        calibrate(patch_model(sharp_model("llama"), "none"), [make_batch("plain", labels=False)])


def test_a_stored_none_stays_stored(tmp_path):
    """It was converted so: a checkpoint keeps the type that it was loaded with."""
    stored = AutoModelForCausalLM.from_config(derived_config("llama")(**TINY, qk_norm="none"))
    stored.save_pretrained(tmp_path / "first")
    AutoModelForCausalLM.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert json.loads((tmp_path / "first" / "config.json").read_text())["model_type"] == "qknorm_llama"
    assert contents(tmp_path / "second") == contents(tmp_path / "first")
