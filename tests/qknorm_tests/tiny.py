"""The smallest model of each family that shows what the family has: windows, layers of every kind."""

from __future__ import annotations

from typing import Any, Final

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_qknorm.families.class_names import PARTS
from qknorm_tests.tiny_mixed import MIXED
from qknorm_tests.tiny_types import ALIKE

# Under the names that the families' configs use; each config takes those that it knows.
TINY: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

TINY_BY_TYPE: Final[dict[str, dict[str, Any]]] = ALIKE | MIXED


def tiny_config(model_type: str, **settings: Any) -> PretrainedConfig:
    """The config of `tiny_model`."""
    config, chosen = CONFIG_MAPPING[model_type], {**TINY, **TINY_BY_TYPE.get(model_type, {}), **settings}
    return config(**{name: x for name, x in chosen.items() if not isinstance(getattr(config, name, None), property)})


def lm_class(model_type: str) -> type[PreTrainedModel]:
    """The class of a type's causal language model."""
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[PARTS.get(model_type, model_type)])


def tiny_model(model_type: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A causal LM of `model_type` with random weights and two small layers, in eval mode; `settings` override."""
    config = tiny_config(model_type, **settings)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        model = lm_class(model_type)._from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", ".A", ".temp")):  # they start at zero: a test must see them
                torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()
