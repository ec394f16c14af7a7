"""Settings of the tiny models whose layers are of several kinds, or that scale or select by position."""

from __future__ import annotations

from typing import Any, Final

from qknorm_tests.tiny_parts import BOTH, EXPERTS, HYBRID, KV_SHARED, LATENT, MAMBA, WINDOW

MIXED: Final[dict[str, dict[str, Any]]] = {
    "bailing_hybrid": {
        **EXPERTS,
        **LATENT,
        **HYBRID,
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "beam": {**EXPERTS, **BOTH, "mlp_layer_types": ["dense", "sparse"]},
    "gemma3n_text": {
        **KV_SHARED,
        "intermediate_size": 96,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
        "pad_token_id": None,  # a row of zeros, of which the model takes a deviation, gives it NaN
    },
    "gemma4_text": {
        **KV_SHARED,
        "per_layer_config": {"01": {"head_dim": 32}, "03": {"head_dim": 32}},
    },
    "gemma4_unified_text": {**BOTH, "per_layer_config": {"01": {"head_dim": 32}}},
    "kimi_linear": {
        **EXPERTS,
        **LATENT,
        **HYBRID,
        "q_lora_rank": None,
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_token": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "lfm3": {**WINDOW, "num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    "llama4_text": {
        **EXPERTS,
        "intermediate_size_mlp": 96,
        "use_qk_norm": False,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 8,
        "floor_scale": 4,
    },
    "longcat_flash": {**EXPERTS, **LATENT, "num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32},
    "ministral3": {
        **WINDOW,
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
        **MAMBA,
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
        **MAMBA,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_headdim": 32,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "use_mem_rope": True,
    },
    "moshi": {"num_codebooks": 2, "audio_encoder_config": {"model_type": "mimi", "hidden_size": 32}, "ffn_dim": 96},
    "phi4_multimodal": {
        **WINDOW,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
        },
        "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 2},
    },
    "doge": {"sliding_window": 16, "keep_window_size": 64},
    "inkling_text": {
        **EXPERTS,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "sliding_window_size": 8,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 8,
        "d_rel": 4,
        "rel_extent": 12,
        "log_scaling_n_floor": 4,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "zaya": {
        **WINDOW,
        "num_experts": 2,
        "moe_intermediate_size": 32,
        "router_hidden_size": 16,
        "layer_types": ["hybrid_sliding", "hybrid"],
    },
    "mllama_text_model": {"cross_attention_layers": [1], "num_hidden_layers": 3, "dropout": 0.1},
    "musicgen_decoder": {"num_codebooks": 2, "ffn_dim": 96, "layerdrop": 0.0},
    "musicgen_melody_decoder": {"num_codebooks": 2, "ffn_dim": 96, "layerdrop": 0.0},
}
