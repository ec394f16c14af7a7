"""BERT's style, encoder or decoder: `query`, `key`, `value`, no RoPE, and the output projected by another module."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_qknorm.families.style import Projected, Style

WEIGHTS = ("query", "key", "value")


def project(module: Any, hidden_states: Tensor) -> Projected:
    shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)
    return tuple(getattr(module, name)(hidden_states).view(shape) for name in WEIGHTS)


BERT = Style(
    project,
    lambda module, attended: attended,
    WEIGHTS,
    dropout=lambda module: module.dropout.p,
    heads=lambda module: (module.num_attention_heads, module.num_attention_heads, module.attention_head_size),
)
