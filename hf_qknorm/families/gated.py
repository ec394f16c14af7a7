"""Models that multiply the result of attention by a gate, computed from the input of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.families import normed
from hf_qknorm.families.style import Projected, Rotated, Style, project, rotate, split_heads


def project_qwen3_next(module: Any, hidden_states: Tensor) -> Projected:
    """The query projection computes a gate beside each head's query."""
    shape = (*hidden_states.shape[:-1], -1, module.head_dim * 2)
    q, gate = torch.chunk(module.q_proj(hidden_states).view(shape), 2, dim=-1)
    gate = gate.reshape(*hidden_states.shape[:-1], -1)
    k = split_heads(module, module.k_proj(hidden_states))
    return module.q_norm(q), module.k_norm(k), split_heads(module, module.v_proj(hidden_states)), gate


def output_gated(module: Any, attended: Tensor, gate: Tensor) -> Tensor:
    return module.o_proj(attended * torch.sigmoid(gate))


def project_afmoe(module: Any, hidden_states: Tensor) -> Projected:
    return *normed.project_normed(module, hidden_states), module.gate_proj(hidden_states)


def project_with_input(module: Any, hidden_states: Tensor) -> Projected:
    """Project as Qwen 3, and pass the input on: the gate is computed from it after attention."""
    return *normed.project_normed(module, hidden_states), hidden_states


def output_laguna(module: Any, attended: Tensor, hidden_states: Tensor) -> Tensor:
    gate = nn.functional.softplus(module.g_proj(hidden_states).float()).to(attended.dtype)
    if module.gate_per_head:
        return module.o_proj((split_heads(module, attended) * gate.unsqueeze(-1)).view(attended.shape))
    return module.o_proj(attended * gate)


def output_lfm3(module: Any, attended: Tensor, hidden_states: Tensor) -> Tensor:
    """LFM 3: one gate per head, if the config asks for it."""
    if module.g_proj is not None:
        gate = torch.sigmoid(module.g_proj(hidden_states)).unsqueeze(-1)
        attended = (split_heads(module, attended) * gate).view(attended.shape)
    return module.o_proj(attended)


def output_beam(module: Any, attended: Tensor, hidden_states: Tensor) -> Tensor:
    gate = split_heads(module, module.gate_proj(hidden_states)) + module.gate_bias[None, None, :, None]
    return module.o_proj((split_heads(module, attended) * torch.sigmoid(gate)).view(attended.shape))


def rotate_beam(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, **arguments: Any) -> Rotated:
    """Beam: queries may be scaled by their position."""
    q, k, v = rotate(module, q, k, v, positions)
    scale = arguments.get("attention_scaling")
    return (q if scale is None else (q.float() * scale).to(q.dtype)), k, v


def query_scale_beam(module: Any) -> float:
    """The scale of the queries at the last position, in layers without RoPE."""
    if module.config.rope_parameters[module.config.layer_types[module.layer_idx]] is not None:
        return 1.0
    place = torch.tensor([[module.config.max_position_embeddings - 1]])
    return float(module.modelling.compute_attention_scaling(place))


def project_hrm(module: Any, hidden_states: Tensor) -> Projected:
    return *project(module, hidden_states), module.gate_proj(hidden_states)


QWEN3_NEXT = Style(project_qwen3_next, output_gated)
AFMOE = Style(project_afmoe, output_gated, rotates=lambda module: module.is_local_attention)
LFM3 = Style(project_with_input, output_lfm3)
BEAM = Style(project_with_input, output_beam, rotate=rotate_beam, query_scale=query_scale_beam)
# HRM's layers run in cycles, and each cycle has its own layers in the cache.
HRM = Style(project_hrm, output_gated, slot=lambda module, cycle_offset=0, **_: module.layer_idx + cycle_offset)
LAGUNA = Style(project_with_input, output_laguna)
