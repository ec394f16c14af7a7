"""Models that scale queries by their position, or rotate by what the attention finds out for itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.families import separate
from hf_qknorm.families.separate import QKV, output
from hf_qknorm.families.style import Heads, Style
from hf_qknorm.families.style import rotate as rotate_plainly


def rotate_llama4(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any) -> Heads:
    """Layers that rotate may norm behind it; those that do not may scale queries far down the text."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if module.use_rope:
        q, k = module.modelling.apply_rotary_emb(q, k, positions.to(q.device))
    if hasattr(module, "qk_norm"):
        q, k = module.qk_norm(q), module.qk_norm(k)
    if module.attn_temperature_tuning and not module.use_rope:
        seen = cache.get_seq_length(module.layer_idx) if cache is not None else 0
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


def rotate_ministral3(
    module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, position_ids: Any = None, **arguments: Any
) -> Heads:
    q, k, v = rotate_plainly(module, q, k, v, positions, cache)
    rope = module.config.rope_parameters
    scales = module.modelling.get_llama_4_attn_scale(
        position_ids, rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    )
    return q * scales.to(q.dtype), k, v


def query_scale_ministral3(module: Any) -> float:
    """The scale of the queries at the last position."""
    rope = module.config.rope_parameters
    spans = (module.config.max_position_embeddings - 1) // rope["original_max_position_embeddings"]
    return max(1.0, 1.0 + rope["llama_4_scaling_beta"] * math.log1p(spans))


def rotate_recurrent_gemma(
    module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, position_ids: Any = None, **arguments: Any
) -> Heads:
    return rotate_plainly(module, q, k, v, module.rotary_emb(v, position_ids), cache)


def slot_given(module: Any, layer_idx: int, **arguments: Any) -> int:
    """Zamba: one attention module stands in many layers, each with a place of its own in the cache."""
    return layer_idx


def where_memory_rotates(module: Any) -> bool:
    return module.config.use_mem_rope


def unsupported_zamba2(config: Any) -> str | None:
    """Why a model with this config can't be patched, if it can't."""
    if config.use_shared_attention_adapter:
        return "use_shared_attention_adapter=True: each layer adds projections of its own to a shared attention"
    return None


LLAMA4 = Style(separate.project, output, QKV, rotate=rotate_llama4, query_scale=query_scale_llama4)
MINISTRAL3 = Style(separate.project, output, QKV, rotate=rotate_ministral3, query_scale=query_scale_ministral3)
RECURRENT_GEMMA = Style(separate.project, output, QKV, rotate=rotate_recurrent_gemma)
ZAMBA = Style(separate.project, output, QKV, rotates=separate.never, slot=slot_given)
ZAMBA2 = Style(separate.project, output, QKV, rotates=where_memory_rotates, slot=slot_given)
