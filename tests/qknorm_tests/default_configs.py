"""Models with the default values of their config classes, in which only the sizes are those of the tiny models."""

from __future__ import annotations

from typing import Any, Final

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_qknorm.families.class_names import PARTS
from qknorm_tests.tiny import TINY, TINY_BY_TYPE, lm_class

# Whole numbers among the tiny models' settings that are no sizes.
NOT_SIZES: Final = {
    "attention_chunk_size", "attention_window_size", "attn_layer_offset", "attn_layer_period", "chunk_size",
    "expert_layer_offset", "first_k_dense_replace", "floor_scale", "keep_window_size", "log_scaling_n_floor",
    "mamba_chunk_size", "max_window_layers", "n_ctx", "num_kv_shared_layers",
    "query_pre_attn_scalar", "rel_extent", "sliding_window", "sliding_window_size",
}  # fmt: skip
TOKENS: Final = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
EXPERTS: Final = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}


def tiny_part(model_type: str, *names: str) -> dict[str, Any]:
    """Some of the settings of a type's tiny model."""
    return {name: TINY_BY_TYPE[model_type][name] for name in names}


# As many layers as it takes for one to attend, lists of a value for each layer, the sizes of a model's other parts, and
# the settings without a default that transformers itself can't build or run a model without.
FILLED: Final[dict[str, dict[str, Any]]] = {
    "bailing_hybrid": {"num_hidden_layers": 6},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": tiny_part("cohere_compass_text", "rope_parameters"),
    "dbrx": tiny_part("dbrx", "attn_config", "ffn_config"),
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": EXPERTS,
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 5},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"num_hidden_layers": 8},
    "kimi_linear": {"num_hidden_layers": 5},
    "lara_mini": {"num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 16},
    "moshi": tiny_part("moshi", "audio_encoder_config"),
    "nemotron": {"num_key_value_heads": 2},
    "phi4_multimodal": tiny_part("phi4_multimodal", "vision_config", "audio_config"),
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xmod": tiny_part("xmod", "default_language"),
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
}


def default_config(model_type: str) -> PretrainedConfig:
    """The config of a type with the defaults of its class, but for sizes and for tokens beyond the vocabulary."""
    config, tiny = CONFIG_MAPPING[model_type], TINY | TINY_BY_TYPE.get(model_type, {})
    numbers = {name: value for name, value in vars(config()).items() if type(value) is int}
    sizes = {name: x for name, x in tiny.items() if type(x) is int and name not in (*NOT_SIZES, *TOKENS)}
    sizes = {name: x for name, x in sizes.items() if config.attribute_map.get(name, name) in numbers}
    tokens = {name: i for i, name in enumerate(TOKENS) if numbers.get(name, 0) >= tiny["vocab_size"]}
    return config(**sizes | tokens | FILLED.get(model_type, {}))


def default_model(model_type: str) -> PreTrainedModel:
    """A model of `default_config` with random weights, in eval mode."""
    torch.manual_seed(0)
    config = default_config(model_type)
    if PARTS.get(model_type, model_type) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return lm_class(model_type)._from_config(config).eval()
    if model_type == "siglip_text_model":  # no Auto class has it
        return transformers.SiglipTextModel(config).eval()
    return transformers.AutoModel.from_config(config).eval()


def default_batch(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Two rows of tokens, two images, or both."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    books = getattr(config, "num_codebooks", 1) if "musicgen" in config.model_type else 1
    tokens = torch.randint(3, TINY["vocab_size"], (2 * books, 20), generator=generator)
    images = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    if model.main_input_name == "pixel_values":
        return images
    batch = {"input_ids": tokens}
    if books > 1:
        batch["encoder_hidden_states"] = torch.randn(2, 7, config.hidden_size, generator=generator)
    return batch | ({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})
