"""Settings under which the smallest model of each family shows what the family has: windows, layers of every kind."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

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

_WINDOW: Final[dict[str, Any]] = {"sliding_window": 8}
_BOTH: Final[dict[str, Any]] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_HYBRID: Final[dict[str, Any]] = {"layer_types": ["linear_attention", "full_attention"]}
_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: Final[dict[str, Any]] = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # of the part that rotates
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_MAMBA: Final[dict[str, Any]] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 8,
    "mamba_d_ssm": 128,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_chunk_size": 16,
    "ssm_state_size": 8,
    "chunk_size": 16,
    "n_groups": 1,
}
_DELTA: Final[dict[str, Any]] = {
    **_HYBRID,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_DECODER: Final[dict[str, Any]] = {"is_decoder": True, "embedding_size": 32}
_SEQ2SEQ: Final[dict[str, Any]] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "init_std": 0.2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
_T5: Final[dict[str, Any]] = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_max_distance": 16,
    "relative_attention_num_buckets": 8,
    "initializer_factor": 1.0,
    "decoder_start_token_id": 0,
}
_IMAGE: Final[dict[str, Any]] = {"image_size": 16, "patch_size": 4, "projection_dim": 32}
_PARTIAL: Final[dict[str, Any]] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
}

TINY_BY_TYPE: Final[dict[str, dict[str, Any]]] = {
    "bart": _SEQ2SEQ,
    "blenderbot": _SEQ2SEQ,
    "blenderbot-small": _SEQ2SEQ,
    "marian": _SEQ2SEQ,
    "mbart": _SEQ2SEQ,
    "mvp": _SEQ2SEQ,
    "pegasus": _SEQ2SEQ,
    "plbart": _SEQ2SEQ,
    "bigbird_pegasus": _SEQ2SEQ,
    "trocr": _SEQ2SEQ,
    "whisper": {**_SEQ2SEQ, "max_target_positions": 128, "max_source_positions": 32, "num_mel_bins": 8},
    "afmoe": {**_EXPERTS, **_BOTH},
    "axk1": {**_EXPERTS, **_LATENT},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bert": _DECODER,
    "bert-generation": _DECODER,
    "big_bird": {**_DECODER, "attention_type": "original_full", "use_bias": True},
    "bloom": {
        "seq_length": 128,
        "hidden_dropout": 0.1,
        "n_head": 6,
        "hidden_size": 96,
    },  # slopes of heads that are no power of 2
    "camembert": _DECODER,
    "clip_text_model": {"projection_dim": 32},
    "clip_vision_model": _IMAGE,
    "codegen": {"rotary_dim": 8, "attn_pdrop": 0.1, "n_ctx": 128},
    "cohere": {"use_qk_norm": False, "logit_scale": 1.0},
    "cohere2": {**_BOTH, "logit_scale": 1.0},
    "cohere2_moe": {**_EXPERTS, **_BOTH, "logit_scale": 1.0},
    "cohere_compass_text": {
        **_BOTH,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "ctrl": {"dff": 96, "n_positions": 128},
    "cwm": _BOTH,
    "data2vec-text": _DECODER,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32},
        "d_model": 64,
    },
    "deepseek_v2": {**_EXPERTS, **_LATENT},
    "deepseek_v3": {**_EXPERTS, **_LATENT},
    "deit": _IMAGE,
    "dots1": {**_EXPERTS, **_BOTH},
    "electra": _DECODER,
    "ernie": _DECODER,
    "ernie4_5_moe": {**_EXPERTS, "moe_num_experts": 4},
    "exaone4": _BOTH,
    "exaone_moe": {**_EXPERTS, **_BOTH},
    "falcon": {"alibi": False, "parallel_attn": True, "ffn_hidden_size": 96},
    "falcon_h1": {**_MAMBA, "key_multiplier": 0.5},
    "flex_olmo": _EXPERTS,
    "flint": {**_EXPERTS, **_BOTH},
    "gemma2": {**_WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_BOTH, "query_pre_attn_scalar": 16},
    "glm4_moe": _EXPERTS,
    "glm4_moe_lite": {**_EXPERTS, **_LATENT},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8, "resid_dropout": 0.1},
    "gpt_oss": {**_EXPERTS, **_BOTH},
    "gptj": {"rotary_dim": 8, "attn_pdrop": 0.1, "n_ctx": 128, "n_inner": 96},
    "granite": {"attention_multiplier": 0.2},
    "granite_swa": {**_BOTH, "layer_rope_theta": [10000.0, 0.0]},
    "granitemoe": {**_EXPERTS, "attention_multiplier": 0.2},
    "granitemoe_swa": {**_EXPERTS, **_BOTH, "layer_rope_theta": [10000.0, 0.0]},
    "granitemoehybrid": {
        **_EXPERTS,
        **_MAMBA,
        **_HYBRID,
        "attention_multiplier": 0.2,
        "position_embedding_type": "rope",
    },
    "granitemoeshared": {**_EXPERTS, "attention_multiplier": 0.2},
    "hunyuan_v1_moe": _EXPERTS,
    "hy_v3": _EXPERTS,
    "ijepa": _IMAGE,
    "jamba": {**_EXPERTS, **_MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "kolibri1": {**_EXPERTS, **_BOTH},
    "laguna": {**_EXPERTS, **_BOTH, "num_attention_heads_per_layer": [4, 4]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mellum": {**_EXPERTS, **_BOTH},
    "mimo_v2_flash": {**_EXPERTS, **_BOTH, "v_head_dim": 12},
    "megatron-bert": _DECODER,
    "minicpm3": _LATENT,
    "minimax": {**_EXPERTS, "layer_types": ["full_attention", "linear_attention"]},
    "minimax_m2": _EXPERTS,
    "ministral": _BOTH,
    "mistral": _WINDOW,
    "mixtral": {**_WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2},
    "modernbert-decoder": _BOTH,
    "mpt": {
        "d_model": 64,
        "max_seq_len": 128,
        "attn_config": {"clip_qkv": 1.0, "alibi_bias_max": 8},
    },
    "nemotron_h": {**_EXPERTS, **_MAMBA, "moe_shared_expert_intermediate_size": 32},
    "olmo": {"clip_qkv": 1.0},
    "olmo3": _BOTH,
    "olmo_hybrid": {**_HYBRID, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "olmoe": {**_EXPERTS, "clip_qkv": 1.0},
    "openai-gpt": {"n_positions": 128, "attn_pdrop": 0.1},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {"qk_layernorm": False},
    "phi": {**_PARTIAL, "qk_layernorm": False},
    "phi3": _WINDOW,
    "phimoe": {**_EXPERTS, **_WINDOW},
    "qwen2": {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {**_EXPERTS, **_BOTH, "use_sliding_window": True},
    "qwen3_5_moe_text": {**_EXPERTS, **_DELTA},
    "qwen3_5_text": _DELTA,
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {**_EXPERTS, **_DELTA},
    "rembert": {**_DECODER, "input_embedding_size": 32, "output_embedding_size": 32},
    "roformer": {**_DECODER, "rotary_value": True},
    "roberta": _DECODER,
    "roberta-prelayernorm": _DECODER,
    "roc_bert": {
        **_DECODER,
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": 64,
        "shape_embed_dim": 8,
        "shape_vocab_size": 64,
    },
    "seed_oss": {"attention_dropout": 0.0},
    "siglip_text_model": {"projection_size": 32},
    "siglip_vision_model": _IMAGE,
    "t5": _T5,
    "mt5": _T5,
    "smollm3": {**_BOTH, "use_sliding_window": True, "no_rope_layers": [1, 0]},
    "solar_open": _EXPERTS,
    "stablelm": {**_PARTIAL, "qk_layernorm": False, "use_parallel_residual": False},
    "starcoder2": _WINDOW,
    "vaultgemma": {**_BOTH, "query_pre_attn_scalar": 16},
    "vit": _IMAGE,
    "vit_msn": _IMAGE,
    "xglm": {"ffn_dim": 96, "attention_heads": 4},
    "xlm-roberta": _DECODER,
    "xlm-roberta-xl": _DECODER,
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "youtu": _LATENT,
    "bailing_hybrid": {
        **_EXPERTS,
        **_LATENT,
        **_HYBRID,
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "beam": {**_EXPERTS, **_BOTH, "mlp_layer_types": ["dense", "sparse"]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": 96,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
        "pad_token_id": None,  # a row of zeros, of which the model takes a deviation, gives it NaN
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "per_layer_config": {"01": {"head_dim": 32}, "03": {"head_dim": 32}},
    },
    "gemma4_unified_text": {**_BOTH, "per_layer_config": {"01": {"head_dim": 32}}},
    "kimi_linear": {
        **_EXPERTS,
        **_LATENT,
        **_HYBRID,
        "q_lora_rank": None,
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_token": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "lfm3": {**_WINDOW, "num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    "llama4_text": {
        **_EXPERTS,
        "intermediate_size_mlp": 96,
        "use_qk_norm": False,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 8,
        "floor_scale": 4,
    },
    "longcat_flash": {**_EXPERTS, **_LATENT, "num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32},
    "ministral3": {
        **_WINDOW,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "recurrent_gemma": {"attention_window_size": 8, "block_types": ["recurrent", "attention"], "lru_width": 64},
    "zamba": {
        **_MAMBA,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 2,
        "mamba_dt_rank": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "zamba2": {
        **_MAMBA,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_headdim": 32,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "use_mem_rope": True,
    },
}


def tiny_config(model_type: str, **settings: Any) -> PretrainedConfig:
    """The config of `tiny_model`."""
    config, chosen = CONFIG_MAPPING[model_type], {**TINY, **TINY_BY_TYPE.get(model_type, {}), **settings}
    return config(**{name: x for name, x in chosen.items() if not isinstance(getattr(config, name, None), property)})


def tiny_model(model_type: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A causal LM of `model_type` with random weights and two small layers, in eval mode; `settings` override."""
    config = tiny_config(model_type, **settings)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # biases start at zero: a test must see them
                torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()
