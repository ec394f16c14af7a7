"""Gemma 3n and 4: some layers compute no keys and values, and attend to the ones that another layer has stored."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_qknorm.families.separate import output
from hf_qknorm.families.style import QKV, Projected, Rotated, Style, split_heads


def project(module: Any, hidden_states: Tensor) -> Projected:
    """Return queries, and keys and values of length 0 in a layer that shares another's."""
    q = module.q_norm(split_heads(module, module.q_proj(hidden_states)))
    if module.is_kv_shared_layer:
        return q, q[:, :0], q[:, :0]
    k = split_heads(module, module.k_proj(hidden_states))
    v = k if getattr(module, "v_proj", None) is None else split_heads(module, module.v_proj(hidden_states))
    return q, module.k_norm(k), module.v_norm(v)


def rotate(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, **arguments: Any) -> Rotated:
    """Apply RoPE to queries and keys separately, on the memory layout `[B, T, H, D]`."""
    rope = module.modelling.apply_rotary_pos_emb
    q = rope(q.transpose(1, 2), *positions, unsqueeze_dim=2).transpose(1, 2)
    if not module.is_kv_shared_layer:
        k = rope(k.transpose(1, 2), *positions, unsqueeze_dim=2).transpose(1, 2)
    return q, k, v


def expand(module: Any, k: Tensor, v: Tensor, shared_kv_states: Any = None, **arguments: Any) -> tuple[Tensor, Tensor]:
    if module.is_kv_shared_layer:
        k, v = shared_kv_states[module.layer_type]
    if module.store_full_length_kv:
        shared_kv_states[module.layer_type] = k, v
    return k, v


GEMMA4 = Style(project, output, QKV, rotate=rotate, expand=expand)
