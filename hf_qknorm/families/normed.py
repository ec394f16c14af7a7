"""Separate projections of models that norm their queries and keys: per head or over all heads, before RoPE or after.

Inkling and Doge also add a learned bias to the logits, computed from the input or from the values. A cap is applied
before it. In Gemma 3n and 4, some layers compute no keys and values, and attend to another layer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.families.separate import clip, has_window, output_out_proj
from hf_qknorm.families.style import CACHE, Projected, Rotated, Style, project, rotate, split_heads


def project_normed(module: Any, hidden_states: Tensor) -> Projected:
    """Qwen 3: each head by itself."""
    q, k, v = project(module, hidden_states)
    return module.q_norm(q), module.k_norm(k), v


def project_transposed(module: Any, hidden_states: Tensor) -> Projected:
    """Apertus, Gemma 3, EXAONE 4: as Qwen 3, in the layout `[B, H, T, D]`, whose sums of gradients match."""
    q, k, v = (x.transpose(1, 2) for x in project(module, hidden_states))
    q, k = module.q_norm(q), module.k_norm(k)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def project_if_configured(module: Any, hidden_states: Tensor) -> Projected:
    """Cohere, GLM-4 MoE: as Qwen 3 if the config's `use_qk_norm` is set, else as Llama."""
    return project_normed(module, hidden_states) if module.use_qk_norm else project(module, hidden_states)


def project_wide(module: Any, hidden_states: Tensor) -> Projected:
    """OLMo 2: all heads together."""
    q, k = module.q_norm(module.q_proj(hidden_states)), module.k_norm(module.k_proj(hidden_states))
    return tuple(split_heads(module, x) for x in (q, k, module.v_proj(hidden_states)))


def project_olmoe(module: Any, hidden_states: Tensor) -> Projected:
    """OLMoE: all heads together, then clipped as in OLMo."""
    q, k = module.q_norm(module.q_proj(hidden_states)), module.k_norm(module.k_proj(hidden_states))
    return clip(module, q, k, module.v_proj(hidden_states))


def project_lfm2(module: Any, hidden_states: Tensor) -> Projected:
    q, k, v = project(module, hidden_states)
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
    """NanoChat and HunYuan: norms after RoPE."""
    q, k, v = rotate(module, q, k, v, positions)
    q_norm, k_norm = (getattr(module, name) for name in module.family.style.own_norms)
    return q_norm(q), k_norm(k), v


def rotates_exaone4(module: Any) -> bool:
    """EXAONE 4: if some layers have a sliding window, only these use RoPE."""
    return module.sliding_window is None or module.is_sliding


def project_gemma4(module: Any, hidden_states: Tensor) -> Projected:
    """Return queries, and keys and values of length 0 in a layer that shares another's."""
    q = module.q_norm(split_heads(module, module.q_proj(hidden_states)))
    if module.is_kv_shared_layer:
        return q, q[:, :0], q[:, :0]
    k = split_heads(module, module.k_proj(hidden_states))
    v = k if getattr(module, "v_proj", None) is None else split_heads(module, module.v_proj(hidden_states))
    return q, module.k_norm(k), module.v_norm(v)


def rotate_gemma4(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, **arguments: Any) -> Rotated:
    """Apply RoPE to queries and keys separately, on the memory layout `[B, T, H, D]`."""
    rope = module.modelling.apply_rotary_pos_emb
    q = rope(q.transpose(1, 2), *positions, unsqueeze_dim=2).transpose(1, 2)
    if not module.is_kv_shared_layer:
        k = rope(k.transpose(1, 2), *positions, unsqueeze_dim=2).transpose(1, 2)
    return q, k, v


def expand_gemma4(
    module: Any, k: Tensor, v: Tensor, shared_kv_states: Any = None, **arguments: Any
) -> tuple[Tensor, Tensor]:
    if module.is_kv_shared_layer:
        k, v = shared_kv_states[module.layer_type]
    if module.store_full_length_kv:
        shared_kv_states[module.layer_type] = k, v
    return k, v


def forward_inkling(
    shared: Callable[..., Any],
    module: Any,
    hidden_states: Tensor,
    *args: Any,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """Inkling: short convolutions with a state of their own, and a bias by distance that is computed from the input."""
    length, cached = hidden_states.shape[1], past_key_values is not None
    seen = past_key_values.get_query_offset(module.layer_idx) if cached else 0
    keys, first = past_key_values.get_mask_sizes(length, module.layer_idx) if cached else (length, 0)
    places = (torch.arange(n, device=hidden_states.device) + start for n, start in ((length, seen), (keys, first)))
    relative = {"relative_input": hidden_states, "places": tuple(places)}
    arguments = {"past_key_values": past_key_values, "state": past_key_values, **relative, **kwargs}
    return shared(hidden_states, *args, **arguments)


def project_inkling(
    module: Any, hidden_states: Tensor, state: Any = None, conv_mask: Tensor | None = None
) -> Projected:
    arguments = {CACHE: state, "conv_mask": conv_mask}
    q = split_heads(module, module.q_proj(hidden_states))
    k = split_heads(module, module.k_sconv(module.k_proj(hidden_states), **arguments))
    v = split_heads(module, module.v_sconv(module.v_proj(hidden_states), **arguments))
    return module.q_norm(q), module.k_norm(k), v


def rotate_inkling(
    module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, *, places: Any, **arguments: Any
) -> Rotated:
    """Inkling: layers without a window scale queries far into the text."""
    factor = _factor(module, places[0])
    return (q if factor is None else (q.float() * factor).to(q.dtype)), k, v


def _factor(module: Any, places: Tensor) -> Tensor | None:
    """The factor of the queries and of their bias, `[1, 1, T, 1]`."""
    config = module.config
    if module.is_sliding or config.log_scaling_n_floor is None:
        return None
    count = (places + 1).float() / config.log_scaling_n_floor
    return (1.0 + config.log_scaling_alpha * torch.log(count.clamp(min=1.0))).view(1, 1, -1, 1)


def query_scale_inkling(module: Any) -> float:
    """The scale of the queries at the last position."""
    factor = _factor(module, torch.tensor([module.config.max_position_embeddings - 1]))
    return 1.0 if factor is None else float(factor)


def bias_inkling(
    module: Any, q: Tensor, k: Tensor, *, relative_input: Tensor, places: tuple[Tensor, Tensor], **options: Any
) -> Tensor:
    relative = module.r_proj(relative_input).view(*relative_input.shape[:-1], module.num_heads, -1)
    bias: Tensor = module.rel_logits_proj(relative, *places)
    factor = _factor(module, places[0])
    return bias if factor is None else (bias.float() * factor).to(bias.dtype)


def bias_doge(module: Any, q: Tensor, k: Tensor, *, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Doge: a number for each value, and for each query the least number for all but the largest of these."""
    values = v.transpose(1, 2).reshape(v.shape[0], v.shape[2], -1)
    weights = torch.exp(module.A * nn.functional.softplus(module.dt_proj(values))).transpose(-1, -2)
    like = q.transpose(1, 2)
    bias = module.prepare_dynamic_mask(like, weights, module.keep_window_size, mask)
    return module.modelling.repeat_kv(bias, module.num_key_value_groups)


def attend_doge(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, position_bias: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The module's own function takes the bias, which contains the mask, in the mask's place."""
    result: tuple[Tensor, Tensor] = module.modelling.eager_attention_forward(module, q, k, v, position_bias, **options)
    return result


QWEN3 = Style(project_normed)
LARA = Style(project_normed, rotates=has_window)
GEMMA3 = Style(project_transposed)
COHERE = Style(project_if_configured)
OLMO2 = Style(project_wide, norms_together=True)
NANOCHAT = Style(rotate=norm_rotated, norms_rotated=True)
HUNYUAN = Style(rotate=norm_rotated, own_norms=("query_layernorm", "key_layernorm"), norms_rotated=True)
OLMOE = Style(project_olmoe, norms_together=True)
LFM2 = Style(project_lfm2, output_out_proj, own_norms=("q_layernorm", "k_layernorm"), dropout=lambda module: 0.0)
EXAONE4 = Style(project_transposed, rotates=rotates_exaone4)
FLINT = Style(project_normed, rotates=has_window)
# One module norms queries and keys together, so that no bound is computed from it.
ZAYA = Style(
    project_zaya,
    weights=("qkv_proj.q_proj", "qkv_proj.k_proj", "qkv_proj.v_proj_current", "qkv_proj.v_proj_delayed"),
    arguments=("state", "conv_mask"),
    forward=forward_zaya,
)
GEMMA4 = Style(project_gemma4, rotate=rotate_gemma4, expand=expand_gemma4)
INKLING = Style(
    project_inkling,
    arguments=("state", "conv_mask"),
    forward=forward_inkling,
    rotate=rotate_inkling,
    rotates=lambda module: False,
    bias=bias_inkling,
    heads=lambda module: (module.num_heads, module.num_key_value_heads, module.head_dim),
    query_scale=query_scale_inkling,
)
DOGE = Style(project_normed, eager=lambda module: attend_doge, bias=bias_doge, reads_masks=True)
