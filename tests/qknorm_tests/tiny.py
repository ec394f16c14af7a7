"""The smallest model of each family that shows what the family has: windows, layers of every kind."""

from dataclasses import fields
from typing import Any, Final

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_qknorm.families import FAMILIES
from hf_qknorm.families.class_names import PARTS

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

EXPERTS: Final = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    "moe_shared_expert_intermediate_size": 32,
}
LATENTS: Final = {
    **{"kv_lora_rank": 24, "q_lora_rank": 20},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
}
RECURRENT: Final = {
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **{"mamba_d_ssm": 128, "linear_num_key_heads": 2, "n_groups": 1},
}
SEQ2SEQ: Final = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "dff", "ffn_hidden_size"), 96),
    **{"d_model": 64, "init_std": 0.2, "decoder_start_token_id": 1, "forced_eos_token_id": None},
}
# A config takes those that its class has.
PARTS_OF_TYPES: Final[dict[str, Any]] = {
    **EXPERTS,
    **LATENTS,
    **RECURRENT,
    **SEQ2SEQ,
    "image_size": 16,
    **{"patch_size": 4, "projection_dim": 32, "projection_size": 32, "embedding_size": 32, "clip_qkv": 1.0},
    **dict.fromkeys(("query_pre_attn_scalar", "router_hidden_size"), 16),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm"), False),
    **dict.fromkeys(("n_positions", "max_target_positions"), 128),
    **{"attention_multiplier": 0.2, "logit_scale": 1.0, "num_codebooks": 2, "layerdrop": 0.0, "mamba_dt_rank": 4},
}

WINDOW: Final = {"sliding_window": 8}
BOTH: Final = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
HYBRID: Final = {"layer_types": ["linear_attention", "full_attention"]}
SPARSE: Final = {"mlp_layer_types": ["dense", "sparse"]}
PARTIAL: Final = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# As in Gemma 3n and 4: the last two layers take the keys and values of the first two
KV_SHARED: Final = {
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, **WINDOW, "layer_types": 2 * BOTH["layer_types"]},
    **{"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
}
ZAMBA: Final = {
    **{"num_hidden_layers": 4, "layers_block_type": 2 * ["linear_attention", "hybrid"]},
    **{"attention_hidden_size": 128, "attention_head_dim": 32, "attn_layer_period": 2, "attn_layer_offset": 1},
}
LIKE: Final = {
    "mistral mixtral phi3 phi4_multimodal phimoe starcoder2 gemma2 zaya ministral3 lfm3 qwen2": WINDOW,
    "afmoe beam cohere2 cohere2_moe cohere_compass_text cwm dots1 exaone4 exaone_moe flint gemma3_text": BOTH,
    "gemma4_unified_text gpt_oss granite_swa granitemoe_swa kolibri1 laguna lara_mini mellum mimo_v2_flash": BOTH,
    "ministral modernbert-decoder olmo3 qwen2_moe smollm3 vaultgemma": BOTH,
    "bailing_hybrid granitemoehybrid kimi_linear olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next": HYBRID,
}
TINY_BY_TYPE: Final[dict[str, dict[str, Any]]] = {
    "bailing_hybrid": SPARSE,
    "bamba": {"attn_layer_indices": [1]},
    "beam": SPARSE,
    "cohere2_moe": {"first_k_dense_replace": 1, **SPARSE},
    "cohere_compass_text": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32},
    },
    "doge": {"sliding_window": 16, "keep_window_size": 64, "num_experts": 16384, "num_experts_per_tok": 64},
    "falcon_h1": {"key_multiplier": 0.5},
    "gemma3n_text": {
        **KV_SHARED,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
        "pad_token_id": None,  # a row of zeros, of which the model takes a deviation, gives it NaN
    },
    "gemma4_text": {**KV_SHARED, "per_layer_config": {"01": {"head_dim": 32}, "03": {"head_dim": 32}}},
    "gemma4_unified_text": {"per_layer_config": {"01": {"head_dim": 32}}},
    "granite_swa": {"layer_rope_theta": [10000.0, 0.0]},
    "granitemoe_swa": {"layer_rope_theta": [10000.0, 0.0]},
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "inkling_text": {
        **{"layer_types": ["hybrid_sliding", "hybrid"], "sliding_window_size": 8, "log_scaling_n_floor": 4},
        **{"swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 12},
        **SPARSE,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "kimi_linear": {"q_lora_rank": None, **SPARSE},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 0], "attention_chunk_size": 8, "floor_scale": 4},
    "longcat_flash": {"num_layers": 1},
    "minimax": {"layer_types": ["full_attention", "linear_attention"]},
    "ministral3": {
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "llama_4_scaling_beta": 0.1},
            "original_max_position_embeddings": 4,
        }
    },
    "mixtral": {"num_experts": 2, "num_local_experts": 2},
    "mllama_text_model": {"cross_attention_layers": [1], "num_hidden_layers": 3, "dropout": 0.1},
    "moshi": {"audio_encoder_config": {"model_type": "mimi", "hidden_size": 32}},
    "opt": {"word_embed_proj_dim": 64},
    "phi": {"rope_parameters": PARTIAL},
    "phi4_multimodal": {
        name: {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, **sizes}
        for name, sizes in (
            ("vision_config", {"num_hidden_layers": 1, "image_size": 28}),
            ("audio_config", {"num_blocks": 1}),
        )
    },
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {"use_sliding_window": True},
    "recurrent_gemma": {"attention_window_size": 8, "block_types": ["recurrent", "attention"], "lru_width": 64},
    "roc_bert": {
        **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim"), 8),
        **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), 64),
        "initializer_range": 0.1,  # of the map of embeddings: with less, its bias makes all tokens alike
    },
    "seed_oss": {"attention_dropout": 0.0},
    "smollm3": {"use_sliding_window": True, "no_rope_layers": [1, 0]},
    "stablelm": {"rope_parameters": PARTIAL, "use_parallel_residual": False},
    "whisper": {"max_source_positions": 32, "num_mel_bins": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**ZAMBA, "n_mamba_heads": 2},
    "zamba2": {**ZAMBA, "n_mamba_heads": 4, "use_mem_rope": True},
    "zaya": {"num_experts": 2, "num_experts_per_tok": 1, "layer_types": ["hybrid_sliding", "hybrid"]},
}
ALIKE: Final = {name: settings for names, settings in LIKE.items() for name in names.split()}


def tiny_settings(model_type: str) -> dict[str, Any]:
    """The settings of `tiny_config`."""
    config: Any = CONFIG_MAPPING[model_type]
    known = {field.name for field in fields(config)} | {*config.attribute_map}
    family = FAMILIES.get(model_type)
    found = TINY | {name: value for name, value in PARTS_OF_TYPES.items() if name in known}
    if family is not None and family.latent:
        found |= {"head_dim": 8, "num_key_value_heads": 4}  # of the part that rotates
    if family is not None and family.causal == "is_decoder":
        found["is_decoder"] = True
    return found | ALIKE.get(model_type, {}) | TINY_BY_TYPE.get(model_type, {})


def tiny_config(model_type: str, **settings: Any) -> PretrainedConfig:
    """The config of `tiny_model`."""
    config, chosen = CONFIG_MAPPING[model_type], {**tiny_settings(model_type), **settings}
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
