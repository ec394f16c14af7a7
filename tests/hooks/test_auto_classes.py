"""Derived model types in the Auto classes, and their use by tokenizers, Trainer and pipelines."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, pipeline
from transformers.models.auto import modeling_auto
from transformers.models.auto.tokenization_auto import MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS, TOKENIZER_MAPPING

from hf_qknorm import patch_model
from hf_qknorm.families.class_names import AUTO_CLASSES
from hf_qknorm.model import derived as derived_classes
from hf_qknorm.model.derived import derived_config, derived_model
from qknorm_tests.covering import covering
from qknorm_tests.tables import MODEL_TYPES, make_batch, sharp_model

CHECKPOINTS = ("llama-shakespeare", "gpt2-shakespeare")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_auto_class_that_knows_the_base_knows_the_derived_model(model_type):
    derived_type = f"qknorm_{model_type}"
    config = AutoConfig.for_model(derived_type, qk_norm="none")
    assert type(config) is derived_config(model_type)
    for name, names in AUTO_CLASSES.items():
        auto_class = getattr(transformers, name)
        if model_type not in names:
            assert type(config) not in auto_class._model_mapping
            continue
        base_name = names[model_type]
        assert names[derived_type] == f"QKNorm{base_name}"
        derived = getattr(derived_classes, f"QKNorm{base_name}")
        base = getattr(transformers, base_name)
        assert issubclass(derived, base)
        assert derived is derived_model(base)
        assert derived.config_class is derived_config(model_type)
        assert pickle.loads(pickle.dumps(derived)) is derived
    assert derived_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_derived_type_finds_the_tokenizer_of_its_base(model_type):
    """This includes types whose tokenizer class on the Hub transformers knows to be wrong."""
    base_config = transformers.CONFIG_MAPPING[model_type]
    for default in (None, "another"):
        expected = TOKENIZER_MAPPING.get(base_config, default)
        assert TOKENIZER_MAPPING.get(derived_config(model_type), default) is expected
    corrected = MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert (f"qknorm_{model_type}" in corrected) == (model_type in corrected)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_label_smoothing_shifts_the_labels(model_type, tmp_path):
    """Trainer shifts labels only for classes that it knows by name as causal language models."""
    batch = make_batch("right")
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    losses = [
        Trainer(model, arguments).compute_loss(model, dict(batch))
        for model in (sharp_model(model_type), patch_model(sharp_model(model_type), "none"))
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    ("model_type", "named"),
    covering(MODEL_TYPES, [None, "GPT2Tokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast"], strength=1),
)
def test_the_class_of_a_tokenizer_is_found_as_for_the_base_model(model_type, named, shared, tmp_path):
    """It comes from the model type if the files name no class (the original GPT-2) or a wrong one."""
    model = sharp_model(model_type)
    for folder, config in (("base", model.config), ("patched", patch_model(model, "soft_cap").config)):
        AutoTokenizer.from_pretrained(shared / "checkpoints" / "gpt2-shakespeare").save_pretrained(tmp_path / folder)
        file = tmp_path / folder / "tokenizer_config.json"
        settings = json.loads(file.read_text()) | {"tokenizer_class": named}
        file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
        config.save_pretrained(tmp_path / folder)
    base, again = (AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("base", "patched"))
    assert type(again) is type(base)
    assert again.backend_tokenizer.to_str() == base.backend_tokenizer.to_str()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_text_generation_pipeline(name, shared, tmp_path):
    source = shared / "checkpoints" / name
    tokenizer = AutoTokenizer.from_pretrained(source)
    prompt, options = "ROMEO:\n", {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    expected = pipeline("text-generation", str(source))(prompt, **options)
    model = AutoModelForCausalLM.from_pretrained(source)
    assert pipeline("text-generation", patch_model(model, "none"), tokenizer=tokenizer)(prompt, **options) == expected
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert pipeline("text-generation", str(tmp_path))(prompt, **options) == expected
