"""A projection each for queries, keys and values, as in Llama, and models that add a step to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.families.style import Projected, Style, project, split_heads


def output_out_proj(module: Any, attended: Tensor) -> Tensor:
    return module.out_proj(attended)


def output_dropped(module: Any, attended: Tensor) -> Tensor:
    """Starcoder 2 and Seed-OSS: dropout after the projection."""
    return nn.functional.dropout(module.o_proj(attended), p=module.residual_dropout, training=module.training)


def project_multiplied(module: Any, hidden_states: Tensor) -> Projected:
    """Falcon-H1: keys are multiplied by a number from the config."""
    q, k, v = project(module, hidden_states)
    return q, k * module.key_multiplier, v


def project_clipped(module: Any, hidden_states: Tensor) -> Projected:
    """OLMo: clipped to the config's `clip_qkv`, if it is set."""
    projected, bound = project(module, hidden_states), module.config.clip_qkv
    for x in () if bound is None else projected:
        x.clamp_(min=-bound, max=bound)
    return projected


def project_mimo(module: Any, hidden_states: Tensor) -> Projected:
    """MiMo: values have a width of their own, and are multiplied by a number from the config."""
    q = split_heads(module, module.q_proj(hidden_states))
    k = split_heads(module, module.k_proj(hidden_states))
    v = module.v_proj(hidden_states)
    v = v.view(*v.shape[:-1], -1, module.v_head_dim).transpose(1, 2) * module.v_scale
    return q, k, v.transpose(1, 2)


def project_hrm(module: Any, hidden_states: Tensor) -> Projected:
    """HRM: a gate for the output."""
    return *project(module, hidden_states), module.gate_proj(hidden_states)


def output_hrm(module: Any, attended: Tensor, gate: Tensor) -> Tensor:
    return module.o_proj(attended * torch.sigmoid(gate))


def has_window(module: Any) -> bool:
    """Cohere 2: only layers with a sliding window use RoPE."""
    return module.sliding_window is not None


def heads(module: Any) -> tuple[int, int, int]:
    return module.num_heads, module.num_heads, module.head_dim


def output_dense(module: Any, attended: Tensor) -> Tensor:
    return module.dense(attended)


def forward_by_role(shared: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Pass `is_causal`, which the module lacks or has as False: attention functions read it where the mask is None."""
    return shared(*args, is_causal=module.is_decoder, **kwargs)


def forward_ctrl(shared: Callable[..., Any], module: Any, v: Tensor, k: Tensor, q: Tensor, **kwargs: Any) -> Any:
    """CTRL: its layers pass the same tensor three times."""
    return shared(q, **kwargs)


LLAMA = Style()
MLLAMA = replace(LLAMA, dropout=lambda module: module.dropout)
STARCODER2 = Style(output=output_dropped)
BITNET = Style(output=lambda module, attended: module.o_proj(module.attn_sub_norm(attended)))
MODERNBERT = Style(output=lambda module, attended: module.out_drop(module.Wo(attended)))
FALCON_H1 = Style(project_multiplied)
OLMO = Style(project_clipped)
MIMO = Style(project_mimo)
JAMBA = Style(rotates=lambda module: False)
COHERE2 = Style(rotates=has_window)
COHERE2_MOE = Style(rotates=lambda module: has_window(module) or module.force_rope)
SMOLLM3 = Style(rotates=lambda module: bool(module.use_rope))
# HRM's layers run in cycles, and each cycle has its own layers in the cache.
HRM = Style(project_hrm, output_hrm, slot=lambda module, cycle_offset=0, **_: module.layer_idx + cycle_offset)
WEIGHTS_CTRL = ("Wq", "Wk", "Wv")
CTRL = Style(
    partial(project, weights=WEIGHTS_CTRL),
    output_dense,
    WEIGHTS_CTRL,
    forward=forward_ctrl,
    dropout=lambda module: 0.0,  # the model applies none
    heads=heads,
    length=lambda module: module.config.n_positions,
)
OPT = Style(output=output_out_proj, dropout=lambda module: module.dropout, prescaled=True)
BIOGPT = Style(output=output_out_proj, dropout=lambda module: module.dropout)
# Several layers of Zamba share an attention module, and each has its own index in the cache.
ZAMBA = Style(rotates=lambda module: False, slot=lambda module, layer_idx, **_: layer_idx)
ZAMBA2 = replace(ZAMBA, rotates=lambda module: module.config.use_mem_rope)
