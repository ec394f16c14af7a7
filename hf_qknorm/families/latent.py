"""Multi-head latent attention, as DeepSeek's: the cache holds a latent and one rotated key for all heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_qknorm.families.style import Heads, Projected, Style


def project(module: Any, hidden_states: Tensor) -> Projected:
    """Queries, the latent as the one head of keys, and the key that rotates as the one head of values."""
    if module.q_lora_rank is None:
        q = module.q_proj(hidden_states)
    else:
        q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
    latent, k_rotated = torch.split(
        module.kv_a_proj_with_mqa(hidden_states), [module.kv_lora_rank, module.qk_rope_head_dim], dim=-1
    )
    latent = module.kv_a_layernorm(latent)
    return q.view(*q.shape[:-1], -1, module.qk_head_dim), latent.unsqueeze(2), k_rotated.unsqueeze(2)


def output(module: Any, attended: Tensor) -> Tensor:
    return module.o_proj(attended)


def rotate(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any) -> Heads:
    return _rotated(module.modelling.apply_rotary_pos_emb, module, q, k, v, positions)


def rotate_pairs(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any) -> Heads:
    return _rotated(module.modelling.apply_rotary_pos_emb_interleave, module, q, k, v, positions)


def rotate_as_told(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any) -> Heads:
    """DeepSeek V3: neighbours or halves, as the config says."""
    turn = rotate_pairs if module.config.rope_interleave else rotate
    return turn(module, q, k, v, positions, cache)


def rotate_complex(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any) -> Heads:
    """DeepSeek V2: the angles come as complex numbers."""
    return _rotated(module.modelling.apply_rotary_emb, module, q, k, v, (positions.to(q.device),))


def _rotated(turn: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any) -> Heads:
    q_plain, q_turned = torch.split(q, [module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    q_turned, v = turn(q_turned, v, *positions)
    return torch.cat((q_plain, q_turned), dim=-1), k, v


def keep(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any) -> Heads:
    """Kimi: no RoPE."""
    return q, k, v


def project_longcat(module: Any, hidden_states: Tensor) -> Projected:
    """LongCat: queries and latent times numbers of the config's."""
    q, k, v = project(module, hidden_states)
    return q * module.mla_scale_q_lora, k * module.mla_scale_kv_lora, v


def project_bailing(module: Any, hidden_states: Tensor) -> Projected:
    """Bailing: the queries straight; the output gets a gate for each head, made of the input."""
    q = module.q_proj(hidden_states)
    latent, k_rotated = torch.split(
        module.kv_a_proj_with_mqa(hidden_states), [module.kv_lora_rank, module.qk_rope_head_dim], dim=-1
    )
    latent = module.kv_a_layernorm(latent)
    return q.view(*q.shape[:-1], -1, module.qk_head_dim), latent.unsqueeze(2), k_rotated.unsqueeze(2), hidden_states


def output_bailing(module: Any, attended: Tensor, hidden_states: Tensor) -> Tensor:
    gate = torch.sigmoid(module.g_proj(hidden_states).float()).to(hidden_states.dtype)
    heads = attended.view(*attended.shape[:-1], -1, module.v_head_dim) * gate.unsqueeze(-1)
    return module.o_proj(heads.view(attended.shape))


def expand(module: Any, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    return module.expand_kv(k, v)


WEIGHTS = ("kv_a_proj_with_mqa", "kv_b_proj")
LATENT = Style(project, output, WEIGHTS, rotate=rotate, expand=expand)
LATENT_CONFIGURED = Style(project, output, WEIGHTS, rotate=rotate_as_told, expand=expand)
LATENT_COMPLEX = Style(project, output, WEIGHTS, rotate=rotate_complex, expand=expand)
LATENT_UNROTATED = Style(project, output, WEIGHTS, rotate=keep, expand=expand)
LONGCAT = Style(project_longcat, output, WEIGHTS, rotate=rotate_pairs, expand=expand)
BAILING = Style(project_bailing, output_bailing, WEIGHTS, rotate=rotate_pairs, expand=expand)
