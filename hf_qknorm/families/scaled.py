"""Models that scale queries by their position, compute their own position embeddings, or share a module."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.families.separate import output, project
from hf_qknorm.families.style import QKV, Projected, Rotated, Style, rotate, split_heads


def rotate_llama4(
    module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, *, past_key_values: Any, **arguments: Any
) -> Rotated:
    """Llama 4: layers with RoPE may norm after it; layers without may scale queries far into the text."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if module.use_rope:
        q, k = module.modelling.apply_rotary_emb(q, k, positions.to(q.device))
    if hasattr(module, "qk_norm"):
        q, k = module.qk_norm(q), module.qk_norm(k)
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


def rotate_recurrent_gemma(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, **arguments: Any) -> Rotated:
    return rotate(module, q, k, v, module.rotary_emb(v, arguments.get("position_ids")))


def project_moshi(module: Any, hidden_states: Tensor, codebook_idx: Tensor | None = None) -> Projected:
    """Moshi: its depth decoder has a projection for each codebook."""
    q, k, v = (split_heads(module, getattr(module, name)(hidden_states, codebook_idx)) for name in QKV)
    return q, k, v, codebook_idx


def output_moshi(module: Any, attended: Tensor, codebook_idx: Tensor | None) -> Tensor:
    return module.o_proj(attended, codebook_idx)


def rotate_moshi(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, **arguments: Any) -> Rotated:
    """Moshi: its depth decoder has no RoPE."""
    if module.rotary_emb is None:
        return q, k, v
    return rotate(module, q, k, v, module.rotary_emb(v, arguments.get("position_ids")))


def unsupported_zamba2(config: Any) -> str | None:
    """Return the reason why a model with this config can't be patched, or None."""
    reason = "use_shared_attention_adapter=True: each layer adds projections of its own to a shared attention"
    return reason if config.use_shared_attention_adapter else None


LLAMA4 = Style(
    project,
    output,
    QKV,
    rotate=rotate_llama4,
    query_scale=query_scale_llama4,
    own_norms=("qk_norm", "qk_norm"),
    norms_rotated=True,
)
MINISTRAL3 = Style(project, output, QKV, rotate=rotate_ministral3, query_scale=query_scale_ministral3)
RECURRENT_GEMMA = Style(project, output, QKV, rotate=rotate_recurrent_gemma)
MOSHI = Style(
    project_moshi,
    output_moshi,
    tuple(f"{name}.linear" for name in QKV),
    arguments=("codebook_idx",),
    rotate=rotate_moshi,
)
# Several layers of Zamba share an attention module, and each has its own index in the cache.
ZAMBA = Style(
    project,
    output,
    QKV,
    rotates=lambda module: False,
    slot=lambda module, layer_idx, **_: layer_idx,
)
ZAMBA2 = replace(ZAMBA, rotates=lambda module: module.config.use_mem_rope)
