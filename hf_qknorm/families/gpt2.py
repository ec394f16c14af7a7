"""GPT-2's style: `c_attn` (a transposed Linear) for q, k and v, dropout modules, and a switch that upcasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_qknorm.families.style import Projected, Style, split_heads


def project(module: Any, hidden_states: Tensor) -> Projected:
    q, k, v = module.c_attn(hidden_states).split(module.split_size, dim=2)
    return split_heads(module, q), split_heads(module, k), split_heads(module, v)


def output(module: Any, attended: Tensor) -> Tensor:
    return module.resid_dropout(module.c_proj(attended))


def eager(module: Any) -> Callable[..., Any]:
    return upcast_attention if module.reorder_and_upcast_attn else module.modelling.eager_attention_forward


def upcast_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """`reorder_and_upcast_attn=True`: the model's own method, which applies scale and dropout itself."""
    return module._upcast_and_reordered_attn(query, key, value, attention_mask)


GPT2 = Style(project, output, weights=("c_attn",), dropout=lambda module: module.attn_dropout.p, eager=eager)
