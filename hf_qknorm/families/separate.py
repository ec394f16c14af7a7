"""A projection each for queries, keys and values, as in Llama, and models that add a step to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hf_qknorm.families.style import QKV, Projected, Style, split_heads


def project(module: Any, hidden_states: Tensor) -> Projected:
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    q, k, v = module.q_proj(hidden_states), module.k_proj(hidden_states), module.v_proj(hidden_states)
    return q.view(shape), k.view(shape), v.view(shape)


def output(module: Any, attended: Tensor) -> Tensor:
    return module.o_proj(attended)


def output_out_proj(module: Any, attended: Tensor) -> Tensor:
    return module.out_proj(attended)


def output_dropped(module: Any, attended: Tensor) -> Tensor:
    """Starcoder 2 and Seed-OSS: dropout after the projection."""
    return nn.functional.dropout(module.o_proj(attended), p=module.residual_dropout, training=module.training)


def project_multiplied(module: Any, hidden_states: Tensor) -> Projected:
    """Falcon-H1: keys are multiplied by a number from the config."""
    q, k, v = project(module, hidden_states)
    return q, k * module.key_multiplier, v


def clip(module: Any, *projected: Tensor) -> Projected:
    """OLMo: split into heads after clipping to the config's `clip_qkv`, if it is set."""
    bound = module.config.clip_qkv
    for x in () if bound is None else projected:
        x.clamp_(min=-bound, max=bound)
    return tuple(split_heads(module, x) for x in projected)


def project_clipped(module: Any, hidden_states: Tensor) -> Projected:
    return clip(module, *(getattr(module, name)(hidden_states) for name in QKV))


def project_mimo(module: Any, hidden_states: Tensor) -> Projected:
    """MiMo: values have a width of their own, and are multiplied by a number from the config."""
    q = split_heads(module, module.q_proj(hidden_states))
    k = split_heads(module, module.k_proj(hidden_states))
    v = module.v_proj(hidden_states)
    v = v.view(*v.shape[:-1], -1, module.v_head_dim).transpose(1, 2) * module.v_scale
    return q, k, v.transpose(1, 2)


def has_window(module: Any) -> bool:
    """Cohere 2: only layers with a sliding window use RoPE."""
    return module.sliding_window is not None


LLAMA = Style(project, output, QKV)
MLLAMA = replace(LLAMA, dropout=lambda module: module.dropout)
STARCODER2 = Style(project, output_dropped, QKV)
BITNET = Style(project, lambda module, attended: module.o_proj(module.attn_sub_norm(attended)), QKV)
MODERNBERT = Style(project, lambda module, attended: module.out_drop(module.Wo(attended)), QKV)
FALCON_H1 = Style(project_multiplied, output, QKV)
OLMO = Style(project_clipped, output, QKV)
MIMO = Style(project_mimo, output, QKV)
JAMBA = Style(project, output, QKV, rotates=lambda module: False)
COHERE2 = Style(project, output, QKV, rotates=has_window)
COHERE2_MOE = Style(project, output, QKV, rotates=lambda module: has_window(module) or module.force_rope)
SMOLLM3 = Style(project, output, QKV, rotates=lambda module: bool(module.use_rope))
