"""One projection for q, k and v: in blocks (all queries, all keys, all values), or interleaved by head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_qknorm.families.separate import output_dense, output_out_proj
from hf_qknorm.families.style import Projected, Style, split_heads


def project_phi3(module: Any, hidden_states: Tensor) -> Projected:
    keys = module.num_key_value_heads * module.head_dim
    sizes = [module.config.num_attention_heads * module.head_dim, keys, keys]
    return tuple(split_heads(module, x) for x in module.qkv_proj(hidden_states).split(sizes, dim=-1))


def project_neox(module: Any, hidden_states: Tensor) -> Projected:
    shape = (*hidden_states.shape[:-1], -1, 3 * module.head_size)
    return module.query_key_value(hidden_states).view(shape).chunk(3, dim=-1)


def project_dbrx(module: Any, hidden_states: Tensor) -> Projected:
    """DBRX: clipped to the config's `clip_qkv`, if it is set."""
    bound = module.clip_qkv
    qkv = module.Wqkv(hidden_states).clamp(min=-bound if bound is not None else None, max=bound)
    keys = module.num_key_value_heads * module.head_dim
    return tuple(split_heads(module, x) for x in qkv.split([module.hidden_size, keys, keys], dim=2))


def project_gpt2(module: Any, hidden_states: Tensor) -> Projected:
    """GPT-2: `c_attn`, a transposed Linear, for q, k and v."""
    return tuple(split_heads(module, x) for x in module.c_attn(hidden_states).split(module.split_size, dim=2))


def output_c_proj(module: Any, attended: Tensor) -> Tensor:
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


PHI3 = Style(project_phi3, weights=("qkv_proj",))
NEOX = Style(project_neox, output_dense, weights=("query_key_value",), interleaved=lambda module: True)
DBRX = Style(project_dbrx, output_out_proj, weights=("Wqkv",))
GPT2 = Style(project_gpt2, output_c_proj, ("c_attn",), dropout=lambda module: module.attn_dropout.p, eager=eager_gpt2)
BIGCODE = Style(
    project_bigcode,
    output_c_proj,
    ("c_attn",),
    dropout=lambda module: module.attn_dropout,
    heads=lambda module: (module.num_heads, 1 if module.multi_query else module.num_heads, module.head_dim),
    interleaved=lambda module: not module.multi_query,
)
