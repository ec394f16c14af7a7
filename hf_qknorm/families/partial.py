"""Phi, StableLM and Persimmon: the attention module itself splits each head into a rotated part and the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_qknorm.families import separate
from hf_qknorm.families.fused import output_dense
from hf_qknorm.families.style import QKV, Projected, Rotated, Style


def rotate_part(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, **arguments: Any) -> Rotated:
    width = module.rotary_ndims
    q_rotated, k_rotated = module.modelling.apply_rotary_pos_emb(q[..., :width], k[..., :width], *positions)
    return torch.cat((q_rotated, q[..., width:]), dim=-1), torch.cat((k_rotated, k[..., width:]), dim=-1), v


def project(module: Any, hidden_states: Tensor) -> Projected:
    """Apply the norms that the config may switch on, on the memory layout `[B, H, T, D]`."""
    q, k, v = separate.project(module, hidden_states)
    if module.qk_layernorm:
        q = module.q_layernorm(q.transpose(1, 2)).transpose(1, 2)
        k = module.k_layernorm(k.transpose(1, 2)).transpose(1, 2)
    return q, k, v


def project_persimmon(module: Any, hidden_states: Tensor) -> Projected:
    q, k, v = module._split_heads(module.query_key_value(hidden_states))
    return (module.q_layernorm(q), module.k_layernorm(k), v) if module.qk_layernorm else (q, k, v)


NORMS = ("q_layernorm", "k_layernorm")
PHI = Style(project, output_dense, QKV, rotate=rotate_part, own_norms=NORMS)
STABLELM = Style(project, separate.output, QKV, rotate=rotate_part, own_norms=NORMS)
PERSIMMON = Style(
    project_persimmon,
    output_dense,
    ("query_key_value",),
    rotate=rotate_part,
    own_norms=NORMS,
    dropout=lambda module: module.config.attention_dropout,
    interleaved=lambda module: True,
)
