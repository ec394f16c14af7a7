"""T5: a learned bias of the logits by relative position, computed in the first layer, and logits without a scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.families.style import Projected, Style


def _split(module: Any, x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, module.key_value_proj_dim)


def project(module: Any, hidden_states: Tensor) -> Projected:
    return tuple(_split(module, getattr(module, name)(hidden_states)) for name in WEIGHTS)


def project_across(
    module: Any, hidden_states: Tensor, states: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    q = _split(module, module.q(hidden_states))
    return (
        (q, None, None) if states is None else (q, _split(module, module.k(states)), _split(module, module.v(states)))
    )


def forward(
    shared: Callable[..., Any],
    module: Any,
    hidden_states: Tensor,
    mask: Tensor | None = None,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The module returns the position bias, too, which the first layer computes for all of them."""
    if position_bias is None:
        position_bias = _position_bias(module, hidden_states, key_value_states, past_key_values)
    arguments = {"past_key_values": past_key_values, "key_value_states": key_value_states, **kwargs}
    own = module.config._attn_implementation.startswith("hf_qknorm")  # others repeat the model's operations
    added = None if own and key_value_states is not None else position_bias  # in cross-attention it is 0
    out, weights = shared(hidden_states, mask, position_bias=added, **arguments)
    return out, position_bias, weights


def _position_bias(module: Any, hidden_states: Tensor, states: Tensor | None, cache: Any) -> Tensor:
    """The bias `[1, H, T, S]`; 0 in cross-attention."""
    length = hidden_states.shape[1]
    keys: Any = length
    seen: Any = 0
    if cache is not None:
        own = getattr(cache, "self_attention_cache", cache)
        keys, _ = own.get_mask_sizes(length, module.layer_idx)
        counted: Any = own.get_seq_length(module.layer_idx)
        seen = counted.clone() if isinstance(counted, Tensor) else counted  # a static cache counts in place
    if module.has_relative_attention_bias:
        bias: Tensor = module.compute_bias(length, keys, device=hidden_states.device, past_seen_tokens=seen)
        return bias
    keys = keys if states is None else states.shape[1]
    return torch.zeros((1, module.n_heads, length, keys), device=hidden_states.device, dtype=hidden_states.dtype)


WEIGHTS = ("q", "k", "v")
T5 = Style(
    project,
    lambda module, attended: module.o(attended),
    WEIGHTS,
    project_across=project_across,
    forward=forward,
    dropout=lambda module: module.dropout,
    heads=lambda module: (module.n_heads, module.n_heads, module.key_value_proj_dim),
    length=lambda module: getattr(module.config, "n_positions", 512),  # that of its training
)
