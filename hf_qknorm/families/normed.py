"""Separate projections of models that norm their queries and keys: per head or over all, before RoPE or after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_qknorm.families import separate
from hf_qknorm.families.separate import QKV, output, output_out_proj, where_it_slides
from hf_qknorm.families.style import Heads, Projected, Style, rotate, split_heads


def project(module: Any, hidden_states: Tensor) -> Projected:
    """Qwen 3: each head by itself."""
    q, k, v = separate.project(module, hidden_states)
    return module.q_norm(q), module.k_norm(k), v


def project_transposed(module: Any, hidden_states: Tensor) -> Projected:
    """Apertus, Gemma 3, EXAONE 4: as Qwen 3, on the memory layout `[B, H, T, D]`, in which gradients are summed."""
    q, k, v = (x.transpose(1, 2) for x in separate.project(module, hidden_states))
    q, k = module.q_norm(q), module.k_norm(k)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def project_where_told(module: Any, hidden_states: Tensor) -> Projected:
    """Cohere, GLM-4 MoE: as Qwen 3 where the config says so."""
    return project(module, hidden_states) if module.use_qk_norm else separate.project(module, hidden_states)


def project_wide(module: Any, hidden_states: Tensor) -> Projected:
    """OLMo 2: all heads together."""
    return (
        split_heads(module, module.q_norm(module.q_proj(hidden_states))),
        split_heads(module, module.k_norm(module.k_proj(hidden_states))),
        split_heads(module, module.v_proj(hidden_states)),
    )


def project_olmoe(module: Any, hidden_states: Tensor) -> Projected:
    """OLMoE: all heads together, and then clipped as OLMo."""
    q, k = module.q_norm(module.q_proj(hidden_states)), module.k_norm(module.k_proj(hidden_states))
    v = module.v_proj(hidden_states)
    bound = module.config.clip_qkv
    for x in () if bound is None else (q, k, v):
        x.clamp_(min=-bound, max=bound)
    return split_heads(module, q), split_heads(module, k), split_heads(module, v)


def project_lfm2(module: Any, hidden_states: Tensor) -> Projected:
    q, k, v = separate.project(module, hidden_states)
    return module.q_layernorm(q), module.k_layernorm(k), v


def no_dropout(module: Any) -> float:
    return 0.0


def normed_after(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any) -> Heads:
    """NanoChat: the norms behind RoPE."""
    q, k, v = rotate(module, q, k, v, positions, cache)
    return module.q_norm(q), module.k_norm(k), v


def normed_after_hunyuan(
    module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any
) -> Heads:
    q, k, v = rotate(module, q, k, v, positions, cache)
    return module.query_layernorm(q), module.key_layernorm(k), v


def unless_full(module: Any) -> bool:
    """EXAONE 4: where layers of both kinds alternate, only those with a window rotate."""
    return module.sliding_window is None or module.is_sliding


NORMED = Style(project, output, QKV)
NORMED_TRANSPOSED = Style(project_transposed, output, QKV)
NORMED_IF_CONFIGURED = Style(project_where_told, output, QKV)
NORMED_WIDE = Style(project_wide, output, QKV)
NORMED_AFTER = Style(separate.project, output, QKV, rotate=normed_after)
HUNYUAN = Style(separate.project, output, QKV, rotate=normed_after_hunyuan)
OLMOE = Style(project_olmoe, output, QKV)
LFM2 = Style(project_lfm2, output_out_proj, QKV, dropout=no_dropout)
EXAONE4 = Style(project_transposed, output, QKV, rotates=unless_full)
FLINT = Style(project, output, QKV, rotates=where_it_slides)
