"""Derived model types in the Auto classes, and their use by tokenizers, Trainer and pipelines."""

import json
import pickle

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, pipeline
from transformers.models.auto.tokenization_auto import MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS, TOKENIZER_MAPPING

from hf_qknorm import patch_model
from hf_qknorm.families import known_families
from hf_qknorm.families.class_names import AUTO_CLASSES
from hf_qknorm.model import derived as derived_classes
from hf_qknorm.model.derived import derived_config, derived_model
from qknorm_tests.covering import covering
from qknorm_tests.tables import MODEL_TYPES, chosen, make_batch, sharp_model

OTHER_TYPES = ("bart", "bert", "clip_text_model", "deit", "siglip_vision_model", "whisper")
CHECKPOINTS = ("llama-shakespeare", "gpt2-shakespeare")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "known" in metafunc.fixturenames:
        metafunc.parametrize("known", chosen(metafunc.config, [*MODEL_TYPES, *OTHER_TYPES], known_families()))


def test_every_auto_class_that_knows_the_base_knows_the_derived_model(known):
    """And its tokenizer, also of types whose tokenizer class on the Hub transformers knows to be wrong."""
    derived_type = f"qknorm_{known}"
    settings = {"is_encoder_decoder": False} if known == "bigbird_pegasus" else {}
    config = AutoConfig.for_model(derived_type, qk_norm="none", **settings)
    assert type(config) is derived_config(known)
    for name, names in AUTO_CLASSES.items():
        assert (type(config) in getattr(transformers, name)._model_mapping) == (known in names)
        bases, found = (names.get(key, ()) for key in (known, derived_type))
        bases, found = ((x,) if isinstance(x, str) else x for x in (bases, found))
        assert found == tuple(f"QKNorm{base}" for base in bases)
        for base, own in zip(bases, found, strict=True):
            derived, base = getattr(derived_classes, own), getattr(transformers, base)
            assert issubclass(derived, base)
            assert derived is derived_model(base)
            assert derived.config_class is derived_config(known)
            assert pickle.loads(pickle.dumps(derived)) is derived
    for default in (None, "another"):
        expected = TOKENIZER_MAPPING.get(transformers.CONFIG_MAPPING[known], default)
        assert TOKENIZER_MAPPING.get(derived_config(known), default) is expected
    corrected = MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert (derived_type in corrected) == (known in corrected)


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
    covering(
        ["gpt2", "gpt_neox", "llama", "qwen2"],
        [None, "GPT2Tokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast"],
        strength=1,
    ),
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
