"""Models of types that no family describes, which take a cap alone."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from hf_qknorm.families.style import FROM_5_24
from qknorm_tests.tiny import TINY

SMALL = {**TINY, "initializer_range": 0.3}

# The Auto class of each type, and its settings.
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dinov2": ("AutoModel", {**SMALL, "image_size": 16, "patch_size": 4}),
    "modernbert": ("AutoModelForMaskedLM", {**SMALL, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}),
    "t5": (
        "AutoModelForSeq2SeqLM",
        {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
        | {"relative_attention_max_distance": 16, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0},
    ),
}
if FROM_5_24:
    TYPES |= {name: ("AutoModelForCausalLM", {**SMALL, "rotary_dim": 8, "n_ctx": 128}) for name in ("codegen", "gptj")}
TYPES = {name: case for name, case in TYPES.items() if name in CONFIG_MAPPING}
TEXT = [name for name, (auto, _) in TYPES.items() if auto != "AutoModel"]


def config_of(model_type: str) -> PretrainedConfig:
    config, settings = CONFIG_MAPPING[model_type], TYPES[model_type][1]
    return config(**{name: x for name, x in settings.items() if not isinstance(getattr(config, name, None), property)})


def made(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return getattr(transformers, TYPES[model_type][0]).from_config(config_of(model_type)).eval()


def batch_for(model_type: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if model_type == "dinov2":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    tokens = torch.randint(3, 64, (2, 20), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, -6:] = 0
    decoder = {"decoder_input_ids": tokens[:, :9].contiguous()} if model_type == "t5" else {}
    return {"input_ids": tokens, "attention_mask": mask, **decoder}
