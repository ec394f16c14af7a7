"""One projection for q, k and v: Phi-3 (`qkv_proj`, one after the other) and GPT-NeoX (interleaved by head)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_qknorm.families import separate
from hf_qknorm.families.style import Projected, Style


def project_phi3(module: Any, hidden_states: Tensor) -> Projected:
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    qkv = module.qkv_proj(hidden_states)
    queries = module.config.num_attention_heads * module.head_dim
    keys = queries + module.num_key_value_heads * module.head_dim
    return qkv[..., :queries].view(shape), qkv[..., queries:keys].view(shape), qkv[..., keys:].view(shape)


def project_neox(module: Any, hidden_states: Tensor) -> Projected:
    shape = (*hidden_states.shape[:-1], -1, 3 * module.head_size)
    q, k, v = module.query_key_value(hidden_states).view(shape).chunk(3, dim=-1)
    return q, k, v


def output_neox(module: Any, attended: Tensor) -> Tensor:
    return module.dense(attended)


PHI3 = Style(project_phi3, separate.output, weights=("qkv_proj",))
NEOX = Style(project_neox, output_neox, weights=("query_key_value",))
