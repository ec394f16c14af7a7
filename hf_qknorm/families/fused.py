"""One projection for q, k and v: in blocks (all queries, all keys, all values), or interleaved by head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_qknorm.families.separate import output, output_out_proj
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


def output_dense(module: Any, attended: Tensor) -> Tensor:
    return module.dense(attended)


PHI3 = Style(project_phi3, output, weights=("qkv_proj",))
NEOX = Style(project_neox, output_dense, weights=("query_key_value",), interleaved=lambda module: True)
DBRX = Style(project_dbrx, output_out_proj, weights=("Wqkv",))
