"""BERT's style, encoder or decoder: `query`, `key`, `value`, no positions, the output projected elsewhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_qknorm.families.style import Projected, Style


def project(module: Any, hidden_states: Tensor) -> Projected:
    shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)
    return (
        module.query(hidden_states).view(shape),
        module.key(hidden_states).view(shape),
        module.value(hidden_states).view(shape),
    )


def output(module: Any, attended: Tensor) -> Tensor:
    return attended


def dropout(module: Any) -> float:
    return module.dropout.p


def heads(module: Any) -> tuple[int, int, int]:
    return module.num_attention_heads, module.num_attention_heads, module.attention_head_size


ENCODER = Style(project, output, weights=("query", "key", "value"), dropout=dropout, heads=heads)
