"""Encoder-decoders, and their decoders alone: BART and its relatives, Whisper, TrOCR, T5. No RoPE.

An attention class serves the encoder, the decoder and the cross-attention between them; all of them are patched. T5
adds a learned bias by relative position to its logits, computed in the first layer, and its logits have no scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.families.inline import Attended, attend_in_batch
from hf_qknorm.families.separate import forward_by_role, heads, output_out_proj
from hf_qknorm.families.style import Projected, Style


def project_across(
    module: Any, hidden_states: Tensor, states: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The decoder's queries, and the encoder's keys and values; None for these without its states."""
    *_, width = module.family.style.heads(module)
    q, k, v = (getattr(module, name) for name in module.family.style.weights)
    q = q(hidden_states).unflatten(-1, (-1, width))
    if states is None:
        return q, None, None
    return q, k(states).unflatten(-1, (-1, width)), v(states).unflatten(-1, (-1, width))


def attend_mvp(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0, **options: Any
) -> Attended:
    """MVP and TrOCR: the module's own computation."""

    def weigh(logits: Tensor) -> Tensor:
        return nn.functional.softmax(logits if mask is None else logits + mask, dim=-1)

    return attend_in_batch(module, q, k, v, weigh=weigh, dropout=dropout)


def project_t5(module: Any, hidden_states: Tensor) -> Projected:
    shape = (*hidden_states.shape[:-1], -1, module.key_value_proj_dim)
    return tuple(getattr(module, name)(hidden_states).view(shape) for name in WEIGHTS_T5)


def forward_t5(
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


BART = Style(output=output_out_proj, project_across=project_across, dropout=lambda module: module.dropout, heads=heads)
BIGBIRD = replace(BART, forward=forward_by_role)
WHISPER = replace(BART, prescaled=True, length=lambda module: module.config.max_target_positions)
INLINE = replace(BART, forward=forward_by_role, inline=True, eager=lambda module: attend_mvp, prescaled=True)
WEIGHTS_T5 = ("q", "k", "v")
T5 = Style(
    project_t5,
    lambda module, attended: module.o(attended),
    WEIGHTS_T5,
    project_across=project_across,
    forward=forward_t5,
    dropout=lambda module: module.dropout,
    heads=lambda module: (module.n_heads, module.n_heads, module.key_value_proj_dim),
    length=lambda module: getattr(module.config, "n_positions", 512),  # in its training
)
