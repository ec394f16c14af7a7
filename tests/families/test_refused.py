"""The model types that are refused: with the reason, and unchanged. Every causal language model is one or the other."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from tables import fingerprint
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_qknorm import FAMILIES, patch_model, unpatch_model
from hf_qknorm.families import REFUSED, family_of
from hf_qknorm.model.attention import patched_layers

# Types of which transformers itself makes no causal language model by their default config.
UNMADE = frozenset(
    {
        "emu3_text_model",
        "gemma3n",
        "gemma4_assistant",
        "gemma4_unified_assistant",
        "mllama_text_model",
        "musicgen",
        "musicgen_melody",
        "qwen4_exp_text",
        "reformer",
    }
)


BY_TOWER = ("fuyu", "got_ocr2", "moss_transcribe_diarize")  # multimodal, and their text tower is patched
FIXED_TOWER = ("gemma3", "gemma4", "gemma4_unified")  # multimodal, and a checkpoint would lose the scheme


def untrained(model_type: str) -> PreTrainedModel:
    """The model of a type's default config, without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_other_types_are_refused_with_the_reason(model_type):
    reason = re.escape(REFUSED[model_type])
    with pytest.raises(ValueError, match=reason):
        family_of(SimpleNamespace(model_type=model_type))
    if model_type in UNMADE | {*BY_TOWER} | (REFUSED.keys() - CONFIG_MAPPING.keys()):
        return
    model = untrained(model_type)
    before = fingerprint(model)
    reason = "from a fixed class" if model_type in FIXED_TOWER else re.escape(REFUSED[model.config.model_type])
    with pytest.raises(ValueError, match=reason):
        patch_model(model, "soft_cap")
    assert fingerprint(model) == before


@pytest.mark.parametrize("model_type", [t for t in BY_TOWER if t in CONFIG_MAPPING])
def test_the_text_tower_of_multimodal_models_is_patched(model_type):
    model = untrained(model_type)
    before = fingerprint(model)
    assert patched_layers(patch_model(model, "soft_cap"))
    assert fingerprint(model) != before
    assert fingerprint(unpatch_model(model)) == before


def test_every_causal_language_model_is_known():
    """By its own type or, as GPT-Sw3 and the text models of others, by that of the class that it is loaded as."""
    classes = {t: name for t, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if not t.startswith("qknorm_")}
    types = {t if t in FAMILIES | REFUSED else own_type(name) for t, name in classes.items()}
    assert types <= FAMILIES.keys() | REFUSED.keys()
    assert not FAMILIES.keys() & REFUSED.keys()
    assert len(types & FAMILIES.keys()) >= 80


def own_type(name: str) -> str:
    return getattr(transformers, name).config_class.model_type
