"""Models that rotate queries and keys in a way of their own: a part of each head, or with a scale by position."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.families.separate import output_dense
from hf_qknorm.families.style import QKV, Projected, Rotated, Style, rotate, split_heads


def rotate_llama4(
    module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, *, past_key_values: Any, **arguments: Any
) -> Rotated:
    """Llama 4: layers without RoPE may scale queries far into the text."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if module.use_rope:
        q, k = module.modelling.apply_rotary_emb(q, k, positions.to(q.device))
    if module.attn_temperature_tuning and not module.use_rope:
        seen = 0 if past_key_values is None else past_key_values.get_seq_length(module.layer_idx)
        place = torch.arange(q.shape[1], device=q.device) + seen
        scales = torch.log1p(torch.floor((place.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        q = (q * scales.view(1, -1, 1, 1)).to(q.dtype)
    return q.transpose(1, 2), k.transpose(1, 2), v


def query_scale_llama4(module: Any) -> float:
    """The scale of the queries at the last position."""
    if not module.attn_temperature_tuning or module.use_rope:
        return 1.0
    spans = module.config.max_position_embeddings // module.floor_scale
    return max(1.0, math.log1p(spans) * module.attn_scale + 1.0)


def rotate_ministral3(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, **arguments: Any) -> Rotated:
    q, k, v = rotate(module, q, k, v, positions)
    rope = module.config.rope_parameters
    settings = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    scales = module.modelling.get_llama_4_attn_scale(arguments.get("position_ids"), *settings)
    return q * scales.to(q.dtype), k, v


def query_scale_ministral3(module: Any) -> float:
    """The scale of the queries at the last position."""
    rope = module.config.rope_parameters
    spans = (module.config.max_position_embeddings - 1) // rope["original_max_position_embeddings"]
    return max(1.0, 1.0 + rope["llama_4_scaling_beta"] * math.log1p(spans))


def project_moshi(module: Any, hidden_states: Tensor, codebook_idx: Tensor | None = None) -> Projected:
    """Moshi: its depth decoder has a projection for each codebook."""
    q, k, v = (split_heads(module, getattr(module, name)(hidden_states, codebook_idx)) for name in QKV)
    return q, k, v, codebook_idx


def output_moshi(module: Any, attended: Tensor, codebook_idx: Tensor | None) -> Tensor:
    return module.o_proj(attended, codebook_idx)


def rotate_by_own_rope(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, **arguments: Any) -> Rotated:
    """RecurrentGemma and Moshi: the module computes the position embeddings. Moshi's depth decoder has no RoPE."""
    if module.rotary_emb is None:
        return q, k, v
    return rotate(module, q, k, v, module.rotary_emb(v, arguments.get("position_ids")))


def rotate_part(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, **arguments: Any) -> Rotated:
    width = module.rotary_ndims
    q_rotated, k_rotated = module.modelling.apply_rotary_pos_emb(q[..., :width], k[..., :width], *positions)
    return torch.cat((q_rotated, q[..., width:]), dim=-1), torch.cat((k_rotated, k[..., width:]), dim=-1), v


def project_persimmon(module: Any, hidden_states: Tensor) -> Projected:
    return module._split_heads(module.query_key_value(hidden_states))


LLAMA4 = Style(
    rotate=rotate_llama4, query_scale=query_scale_llama4, own_norms=("qk_norm", "qk_norm"), norms_rotated=True
)
MINISTRAL3 = Style(rotate=rotate_ministral3, query_scale=query_scale_ministral3)
RECURRENT_GEMMA = Style(rotate=rotate_by_own_rope)
MOSHI = Style(
    project_moshi,
    output_moshi,
    tuple(f"{name}.linear" for name in QKV),
    arguments=("codebook_idx",),
    rotate=rotate_by_own_rope,
)
NORMS = ("q_layernorm", "k_layernorm")
PHI = Style(output=output_dense, rotate=rotate_part, own_norms=NORMS)
STABLELM = Style(rotate=rotate_part, own_norms=NORMS)
PERSIMMON = Style(
    project_persimmon,
    output_dense,
    ("query_key_value",),
    rotate=rotate_part,
    own_norms=NORMS,
    dropout=lambda module: module.config.attention_dropout,
    interleaved=lambda module: True,
)
