"""Models with learned positions in their input and none in attention: OPT, BioGPT, GPT-BigCode."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_qknorm.families import gpt2
from hf_qknorm.families.separate import output_out_proj, project
from hf_qknorm.families.style import QKV, Projected, Style, split_heads


def project_bigcode(module: Any, hidden_states: Tensor) -> Projected:
    """GPT-BigCode: one key head for all queries, or as many as queries and interleaved by head."""
    qkv = module.c_attn(hidden_states)
    if not module.multi_query:
        shape = (*hidden_states.shape[:-1], module.num_heads, 3 * module.head_dim)
        return qkv.view(shape).split(3 * [module.head_dim], dim=3)
    q, k, v = qkv.split((module.embed_dim, module.kv_dim, module.kv_dim), dim=-1)
    return split_heads(module, q), k.unsqueeze(2), v.unsqueeze(2)


def heads_bigcode(module: Any) -> tuple[int, int, int]:
    return module.num_heads, 1 if module.multi_query else module.num_heads, module.head_dim


OPT = Style(project, output_out_proj, QKV, dropout=lambda module: module.dropout, prescaled=True)
BIOGPT = Style(project, output_out_proj, QKV, dropout=lambda module: module.dropout)
BIGCODE = Style(
    project_bigcode,
    gpt2.output,
    ("c_attn",),
    dropout=lambda module: module.attn_dropout,
    heads=heads_bigcode,
    interleaved=lambda module: not module.multi_query,
)
