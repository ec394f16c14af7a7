"""The model types that are refused: with the reason, and unchanged. Every causal language model is one or the other."""

import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_qknorm import FAMILIES, patch_model
from hf_qknorm.families import BY_TOWER, NORMS_REFUSED, REFUSED, family_of
from qknorm_tests.tables import chosen, fingerprint

# Types of which transformers itself makes no causal language model by their default config.
UNMADE = frozenset({"gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "qwen4_exp_text", "reformer"})
FIXED_TOWER = ("gemma3", "gemma4", "gemma4_unified")  # multimodal, and a checkpoint would lose the scheme


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_type" in metafunc.fixturenames:
        made = sorted(t for t in REFUSED if t in CONFIG_MAPPING and t not in UNMADE)
        few = dict.fromkeys([*made[::8], *(t for t in FIXED_TOWER if t in made)])
        metafunc.parametrize("model_type", chosen(metafunc.config, few, made))


def test_a_model_is_refused_unchanged_with_the_reason(model_type):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type]())
    before = fingerprint(model)
    reason = "from a fixed class" if model_type in FIXED_TOWER else re.escape(REFUSED[model.config.model_type])
    with pytest.raises(ValueError, match=reason):
        patch_model(model, "soft_cap")
    assert fingerprint(model) == before


def test_every_type_is_refused_by_its_config():
    for model_type, reason in REFUSED.items():
        with pytest.raises(ValueError, match=re.escape(reason)):
            family_of(SimpleNamespace(model_type=model_type))


def test_every_causal_language_model_is_known():
    """By its own type or, as GPT-Sw3 and the text models of others, by that of the class that it is loaded as."""
    classes = {t: name for t, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if not t.startswith("qknorm_")}
    known = {*FAMILIES, *REFUSED, *NORMS_REFUSED, *BY_TOWER}
    assert {t if t in known else getattr(transformers, x).config_class.model_type for t, x in classes.items()} <= known
    assert len(known) == sum(map(len, (FAMILIES, REFUSED, NORMS_REFUSED, BY_TOWER))), "each is in one table"
