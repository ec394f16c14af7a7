"""Models with positions in their input, and none in attention: OPT, BioGPT, GPT-BigCode."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_qknorm.families.separate import QKV, output_out_proj, project
from hf_qknorm.families.style import Projected, Style, split_heads


def dropout(module: Any) -> float:
    return module.dropout


def project_bigcode(module: Any, hidden_states: Tensor) -> Projected:
    """GPT-BigCode: one key head for all, or as many as queries, interleaved by head."""
    qkv = module.c_attn(hidden_states)
    if not module.multi_query:
        shape = (*hidden_states.shape[:-1], module.num_heads, 3 * module.head_dim)
        return qkv.view(shape).split(3 * [module.head_dim], dim=3)
    q, k, v = qkv.split((module.embed_dim, module.kv_dim, module.kv_dim), dim=-1)
    return split_heads(module, q), k.unsqueeze(2), v.unsqueeze(2)


def output_bigcode(module: Any, attended: Tensor) -> Tensor:
    return module.resid_dropout(module.c_proj(attended))


def dropout_bigcode(module: Any) -> float:
    return module.attn_dropout


def heads_bigcode(module: Any) -> tuple[int, int, int]:
    return module.num_heads, 1 if module.multi_query else module.num_heads, module.head_dim


def interleaved_bigcode(module: Any) -> bool:
    return not module.multi_query


OPT = Style(project, output_out_proj, QKV, dropout=dropout, prescaled=True)
BIOGPT = Style(project, output_out_proj, QKV, dropout=dropout)
BIGCODE = Style(
    project_bigcode,
    output_bigcode,
    ("c_attn",),
    dropout=dropout_bigcode,
    heads=heads_bigcode,
    interleaved=interleaved_bigcode,
)
