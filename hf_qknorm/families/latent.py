"""Multi-head latent attention, as DeepSeek's: the cache holds a latent and one rotated key for all heads.

A scheme norms the two parts of each query and key separately: with c the latent and r the key that rotates, the key of
head h is [norm(U_h·c), RoPE(norm(r))]. The cache then holds c as before, and r normed, rotated and shared by all heads.
A server that absorbs U_h into the query needs one more number for each token and head, 1/rms(U_h·c); see README.md.

Source: Han et al. 2026 (arXiv 2606.16310).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.families.style import Projected, Rotated, Style


def project(module: Any, hidden_states: Tensor) -> Projected:
    """Return the queries as heads, the latent as a single key head, and the key that rotates as a single value head."""
    if getattr(module, "q_lora_rank", None) is None:  # Bailing's module lacks it before transformers 5.24
        q = module.q_proj(hidden_states)
    else:
        q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
    sizes = [module.kv_lora_rank, module.qk_rope_head_dim]
    latent, k_rotated = torch.split(module.kv_a_proj_with_mqa(hidden_states), sizes, dim=-1)
    latent = module.kv_a_layernorm(latent)
    return q.view(*q.shape[:-1], -1, module.qk_head_dim), latent.unsqueeze(2), k_rotated.unsqueeze(2)


def rotate(
    module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, rope: str = "apply_rotary_pos_emb", **arguments: Any
) -> Rotated:
    """Norm the parts of each query, and the key that rotates; then apply the modelling file's function `rope`.

    It rotates that key and the last channels of each query. Without `positions` (Kimi Linear) nothing rotates.
    """
    q_plain, q_rotated = torch.split(q, [*parts(module)], dim=-1)
    q_plain, q_rotated = module.normed("q_norm", q_plain), module.normed("q_rope_norm", q_rotated)
    v = module.normed("k_rope_norm", v)
    if positions is not None:
        turned = getattr(module.modelling, rope)(q_rotated, v, *positions)
        before = q_rotated, v
        q_rotated, v = (x.to(old.dtype) for x, old in zip(turned, before, strict=True))  # Dots 3 Note rotates in fp32
    return torch.cat((q_plain, q_rotated), dim=-1), k, v


rotate_pairs = partial(rotate, rope="apply_rotary_pos_emb_interleave")


def rotate_configured(module: Any, *heads_and_positions: Any, **arguments: Any) -> Rotated:
    """DeepSeek V3: in pairs of neighbours or in halves, by the config's `rope_interleave`."""
    return (rotate_pairs if module.config.rope_interleave else rotate)(module, *heads_and_positions)


def rotate_complex(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, **arguments: Any) -> Rotated:
    """DeepSeek V2: the position embeddings are complex numbers."""
    return rotate(module, q, k, v, (positions.to(q.device),), rope="apply_rotary_emb")


def project_longcat(module: Any, hidden_states: Tensor) -> Projected:
    """LongCat: queries and latent are multiplied by numbers from the config."""
    q, k, v = project(module, hidden_states)
    return q * module.mla_scale_q_lora, k * module.mla_scale_kv_lora, v


def project_bailing(module: Any, hidden_states: Tensor) -> Projected:
    """Bailing: the output's gate for each head is computed from the input."""
    return *project(module, hidden_states), hidden_states


def output_bailing(module: Any, attended: Tensor, hidden_states: Tensor) -> Tensor:
    gate = torch.sigmoid(module.g_proj(hidden_states).float()).to(hidden_states.dtype)
    heads = attended.view(*attended.shape[:-1], -1, module.v_head_dim) * gate.unsqueeze(-1)
    return module.o_proj(heads.view(attended.shape))


def expand(module: Any, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute keys and values from the cached latent and key; norm the keys' part without RoPE, and the values."""
    k, v = module.expand_kv(k, v)
    plain, rotated = torch.split(k, [*parts(module)], dim=-1)
    normed = module.normed("k_norm", plain)
    return (k if normed is plain else torch.cat((normed, rotated), dim=-1)), module.normed("v_norm", v)


def parts(module: Any) -> tuple[int, int]:
    """The widths of a head's parts without and with RoPE."""
    return module.qk_nope_head_dim, module.qk_rope_head_dim


def _heads(module: Any) -> tuple[int, int, int]:
    """Each head has keys of its own, computed from the latent."""
    return module.config.num_attention_heads, module.config.num_attention_heads, module.qk_head_dim


WEIGHTS = ("kv_a_proj_with_mqa", "kv_b_proj")
COMMON: dict[str, Any] = {"weights": WEIGHTS, "expand": expand, "parts": parts, "heads": _heads}
MINICPM3 = Style(project, rotate=rotate, **COMMON)
DEEPSEEK_V3 = Style(project, rotate=rotate_configured, **COMMON)
DEEPSEEK_V2 = Style(project, rotate=rotate_complex, **COMMON)
KIMI_LINEAR = Style(project, rotate=rotate, rotates=lambda module: False, **COMMON)
LONGCAT = Style(project_longcat, rotate=rotate_pairs, **COMMON)
BAILING = Style(project_bailing, output_bailing, rotate=rotate_pairs, **COMMON)
