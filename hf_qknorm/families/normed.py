"""Separate projections of models that norm their queries and keys: per head or over all heads, before RoPE or after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_qknorm.families import separate
from hf_qknorm.families.separate import clip, has_window, output, output_out_proj
from hf_qknorm.families.style import QKV, Projected, Rotated, Style, rotate, split_heads


def project(module: Any, hidden_states: Tensor) -> Projected:
    """Qwen 3: each head by itself."""
    q, k, v = separate.project(module, hidden_states)
    return module.q_norm(q), module.k_norm(k), v


def project_transposed(module: Any, hidden_states: Tensor) -> Projected:
    """Apertus, Gemma 3, EXAONE 4: as Qwen 3, in the layout `[B, H, T, D]`, whose sums of gradients match."""
    q, k, v = (x.transpose(1, 2) for x in separate.project(module, hidden_states))
    q, k = module.q_norm(q), module.k_norm(k)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def project_if_configured(module: Any, hidden_states: Tensor) -> Projected:
    """Cohere, GLM-4 MoE: as Qwen 3 if the config's `use_qk_norm` is set, else as Llama."""
    return project(module, hidden_states) if module.use_qk_norm else separate.project(module, hidden_states)


def project_wide(module: Any, hidden_states: Tensor) -> Projected:
    """OLMo 2: all heads together."""
    q, k = module.q_norm(module.q_proj(hidden_states)), module.k_norm(module.k_proj(hidden_states))
    return tuple(split_heads(module, x) for x in (q, k, module.v_proj(hidden_states)))


def project_olmoe(module: Any, hidden_states: Tensor) -> Projected:
    """OLMoE: all heads together, then clipped as in OLMo."""
    q, k = module.q_norm(module.q_proj(hidden_states)), module.k_norm(module.k_proj(hidden_states))
    return clip(module, q, k, module.v_proj(hidden_states))


def project_lfm2(module: Any, hidden_states: Tensor) -> Projected:
    q, k, v = separate.project(module, hidden_states)
    return module.q_layernorm(q), module.k_layernorm(k), v


def forward_zaya(
    shared: Callable[..., Any],
    module: Any,
    hidden_states: Tensor,
    attention_mask: dict[str, Any] | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """Zaya: convolutions with a state of their own, and a mask for these."""
    masks = attention_mask or {}
    arguments = {"state": past_key_values, "conv_mask": masks.get("conv"), **kwargs}
    return shared(hidden_states, masks.get("causal"), past_key_values=past_key_values, **arguments)


def project_zaya(module: Any, hidden_states: Tensor, state: Any = None, conv_mask: Tensor | None = None) -> Projected:
    q, k, v = module.qkv_proj(hidden_states, state, conv_mask)
    return *module.qk_norm(q, k), v


def norm_rotated(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, **arguments: Any) -> Rotated:
    """NanoChat: norms after RoPE."""
    q, k, v = rotate(module, q, k, v, positions)
    return module.q_norm(q), module.k_norm(k), v


def norm_rotated_hunyuan(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, **arguments: Any) -> Rotated:
    q, k, v = rotate(module, q, k, v, positions)
    return module.query_layernorm(q), module.key_layernorm(k), v


def rotates_exaone4(module: Any) -> bool:
    """EXAONE 4: if some layers have a sliding window, only these use RoPE."""
    return module.sliding_window is None or module.is_sliding


QWEN3 = Style(project, output, QKV)
GEMMA3 = Style(project_transposed, output, QKV)
COHERE = Style(project_if_configured, output, QKV)
OLMO2 = Style(project_wide, output, QKV, norms_together=True)
NANOCHAT = Style(separate.project, output, QKV, rotate=norm_rotated, norms_rotated=True)
HUNYUAN = Style(
    separate.project,
    output,
    QKV,
    rotate=norm_rotated_hunyuan,
    own_norms=("query_layernorm", "key_layernorm"),
    norms_rotated=True,
)
OLMOE = Style(project_olmoe, output, QKV, norms_together=True)
LFM2 = Style(project_lfm2, output_out_proj, QKV, own_norms=("q_layernorm", "k_layernorm"), dropout=lambda module: 0.0)
EXAONE4 = Style(project_transposed, output, QKV, rotates=rotates_exaone4)
FLINT = Style(project, output, QKV, rotates=has_window)
# One module norms queries and keys together, so that no bound is computed from it.
ZAYA = Style(
    project_zaya,
    output,
    ("qkv_proj.q_proj", "qkv_proj.k_proj", "qkv_proj.v_proj_current", "qkv_proj.v_proj_delayed"),
    arguments=("state", "conv_mask"),
    forward=forward_zaya,
)
