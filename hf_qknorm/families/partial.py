"""Phi, StableLM and Persimmon: the attention itself tells the part of each head that rotates from the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_qknorm.families import separate
from hf_qknorm.families.fused import interleaved
from hf_qknorm.families.separate import QKV, output
from hf_qknorm.families.style import Heads, Projected, Style


def rotate_part(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any) -> Heads:
    width = module.rotary_ndims
    q_turned, k_turned = module.modelling.apply_rotary_pos_emb(q[..., :width], k[..., :width], *positions)
    return torch.cat((q_turned, q[..., width:]), dim=-1), torch.cat((k_turned, k[..., width:]), dim=-1), v


def project(module: Any, hidden_states: Tensor) -> Projected:
    """With the norms that the config may switch on, on the memory layout `[B, H, T, D]`."""
    q, k, v = separate.project(module, hidden_states)
    if module.qk_layernorm:
        q = module.q_layernorm(q.transpose(1, 2)).transpose(1, 2)
        k = module.k_layernorm(k.transpose(1, 2)).transpose(1, 2)
    return q, k, v


def project_persimmon(module: Any, hidden_states: Tensor) -> Projected:
    q, k, v = module._split_heads(module.query_key_value(hidden_states))
    return (module.q_layernorm(q), module.k_layernorm(k), v) if module.qk_layernorm else (q, k, v)


def output_dense(module: Any, attended: Tensor) -> Tensor:
    return module.dense(attended)


def dropout_persimmon(module: Any) -> float:
    return module.config.attention_dropout


PHI = Style(project, output_dense, QKV, rotate=rotate_part)
STABLELM = Style(project, output, QKV, rotate=rotate_part)
PERSIMMON = Style(
    project_persimmon,
    output_dense,
    ("query_key_value",),
    rotate=rotate_part,
    dropout=dropout_persimmon,
    interleaved=interleaved,
)
