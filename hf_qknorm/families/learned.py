"""Models with learned positions in their input and none in attention: GPT-2, GPT-BigCode, OPT, BioGPT, CTRL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_qknorm.families.fused import output_dense
from hf_qknorm.families.separate import output_out_proj, project
from hf_qknorm.families.style import QKV, Projected, Style, split_heads


def project_gpt2(module: Any, hidden_states: Tensor) -> Projected:
    """GPT-2: `c_attn`, a transposed Linear, for q, k and v."""
    return tuple(split_heads(module, x) for x in module.c_attn(hidden_states).split(module.split_size, dim=2))


def output(module: Any, attended: Tensor) -> Tensor:
    return module.resid_dropout(module.c_proj(attended))


def eager_gpt2(module: Any) -> Callable[..., Any]:
    """Return the model's function; with `reorder_and_upcast_attn` its method, which applies scale and dropout too."""
    if not module.reorder_and_upcast_attn:
        return module.modelling.eager_attention_forward
    return lambda module, q, k, v, mask, **options: module._upcast_and_reordered_attn(q, k, v, mask)


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


def project_ctrl(module: Any, hidden_states: Tensor) -> Projected:
    return tuple(split_heads(module, getattr(module, name)(hidden_states)) for name in WEIGHTS_CTRL)


def forward_ctrl(shared: Callable[..., Any], module: Any, v: Tensor, k: Tensor, q: Tensor, **kwargs: Any) -> Any:
    """CTRL: its layers pass the same tensor three times."""
    return shared(q, **kwargs)


WEIGHTS_CTRL = ("Wq", "Wk", "Wv")
CTRL = Style(
    project_ctrl,
    output_dense,
    WEIGHTS_CTRL,
    forward=forward_ctrl,
    dropout=lambda module: 0.0,  # the model applies none
    heads=lambda module: (module.num_heads, module.num_heads, module.head_dim),
    length=lambda module: module.config.n_positions,
)
GPT2 = Style(project_gpt2, output, ("c_attn",), dropout=lambda module: module.attn_dropout.p, eager=eager_gpt2)
OPT = Style(project, output_out_proj, QKV, dropout=lambda module: module.dropout, prescaled=True)
BIOGPT = Style(project, output_out_proj, QKV, dropout=lambda module: module.dropout)
BIGCODE = Style(
    project_bigcode,
    output,
    ("c_attn",),
    dropout=lambda module: module.attn_dropout,
    heads=heads_bigcode,
    interleaved=lambda module: not module.multi_query,
)
