"""Settings that the tiny models of several families share."""

from __future__ import annotations

from typing import Any, Final

WINDOW: Final[dict[str, Any]] = {"sliding_window": 8}
BOTH: Final[dict[str, Any]] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
HYBRID: Final[dict[str, Any]] = {"layer_types": ["linear_attention", "full_attention"]}
# As in Gemma 3n and 4: the last two layers take the keys and values of the first two
KV_SHARED: Final[dict[str, Any]] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "sliding_window": 8,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
}
EXPERTS: Final[dict[str, Any]] = {
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
LATENT: Final[dict[str, Any]] = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # of the part that rotates
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
MAMBA: Final[dict[str, Any]] = {
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
DELTA: Final[dict[str, Any]] = {
    **HYBRID,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
DECODER: Final[dict[str, Any]] = {"is_decoder": True, "embedding_size": 32}
SEQ2SEQ: Final[dict[str, Any]] = {
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
IMAGE: Final[dict[str, Any]] = {"image_size": 16, "patch_size": 4, "projection_dim": 32}
PARTIAL: Final[dict[str, Any]] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
}
