"""Multi-head latent attention, as DeepSeek's: the cache holds a latent and one rotated key for all heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_qknorm.families.separate import output
from hf_qknorm.families.style import Projected, Rotated, Style


def project(module: Any, hidden_states: Tensor) -> Projected:
    """Return the queries, the latent as a single key head, and the key that rotates as a single value head."""
    if module.q_lora_rank is None:
        q = module.q_proj(hidden_states)
    else:
        q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
    return _with_latent(module, q, hidden_states)


def _with_latent(module: Any, q: Tensor, hidden_states: Tensor) -> Projected:
    sizes = [module.kv_lora_rank, module.qk_rope_head_dim]
    latent, k_rotated = torch.split(module.kv_a_proj_with_mqa(hidden_states), sizes, dim=-1)
    latent = module.kv_a_layernorm(latent)
    return q.view(*q.shape[:-1], -1, module.qk_head_dim), latent.unsqueeze(2), k_rotated.unsqueeze(2)


def rotate(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any) -> Rotated:
    return _rotate_part(module.modelling.apply_rotary_pos_emb, module, q, k, v, positions)


def rotate_pairs(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any) -> Rotated:
    return _rotate_part(module.modelling.apply_rotary_pos_emb_interleave, module, q, k, v, positions)


def rotate_configured(
    module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any
) -> Rotated:
    """DeepSeek V3: in pairs of neighbours or in halves, by the config's `rope_interleave`."""
    by_config = rotate_pairs if module.config.rope_interleave else rotate
    return by_config(module, q, k, v, positions, cache)


def rotate_complex(
    module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any
) -> Rotated:
    """DeepSeek V2: the position embeddings are complex numbers."""
    return _rotate_part(module.modelling.apply_rotary_emb, module, q, k, v, (positions.to(q.device),))


def _rotate_part(rope: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any) -> Rotated:
    q_plain, q_rotated = torch.split(q, [module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    q_rotated, v = rope(q_rotated, v, *positions)
    return torch.cat((q_plain, q_rotated), dim=-1), k, v


def no_rope(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any) -> Rotated:
    """Kimi: no RoPE."""
    return q, k, v


def project_longcat(module: Any, hidden_states: Tensor) -> Projected:
    """LongCat: queries and latent are multiplied by numbers from the config."""
    q, k, v = project(module, hidden_states)
    return q * module.mla_scale_q_lora, k * module.mla_scale_kv_lora, v


def project_bailing(module: Any, hidden_states: Tensor) -> Projected:
    """Bailing: no latent for the queries. The output's gate for each head is computed from the input."""
    return *_with_latent(module, module.q_proj(hidden_states), hidden_states), hidden_states


def output_bailing(module: Any, attended: Tensor, hidden_states: Tensor) -> Tensor:
    gate = torch.sigmoid(module.g_proj(hidden_states).float()).to(hidden_states.dtype)
    heads = attended.view(*attended.shape[:-1], -1, module.v_head_dim) * gate.unsqueeze(-1)
    return module.o_proj(heads.view(attended.shape))


def expand(module: Any, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    return module.expand_kv(k, v)


WEIGHTS = ("kv_a_proj_with_mqa", "kv_b_proj")
MINICPM3 = Style(project, output, WEIGHTS, rotate=rotate, expand=expand)
DEEPSEEK_V3 = Style(project, output, WEIGHTS, rotate=rotate_configured, expand=expand)
DEEPSEEK_V2 = Style(project, output, WEIGHTS, rotate=rotate_complex, expand=expand)
KIMI_LINEAR = Style(project, output, WEIGHTS, rotate=no_rope, expand=expand)
LONGCAT = Style(project_longcat, output, WEIGHTS, rotate=rotate_pairs, expand=expand)
BAILING = Style(project_bailing, output_bailing, WEIGHTS, rotate=rotate_pairs, expand=expand)
