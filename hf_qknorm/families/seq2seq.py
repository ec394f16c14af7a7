"""Encoder-decoders, and their decoders alone: BART and its relatives, and Whisper. No RoPE.

An attention class serves the encoder, the decoder and the cross-attention between them; all of them are patched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_qknorm.families.separate import forward_by_role, heads, output_out_proj
from hf_qknorm.families.style import Style


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


def project_folded(
    module: Any, hidden_states: Tensor, states: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Whisper: keys and values of a batch of another size are folded into the decoder's, along their length."""
    q, k, v = project_across(module, hidden_states, states)
    if k is None or v is None:
        return q, k, v
    return q, k.reshape(len(q), -1, *k.shape[2:]), v.reshape(len(q), -1, *v.shape[2:])


BART = Style(output=output_out_proj, project_across=project_across, dropout=lambda module: module.dropout, heads=heads)
BIGBIRD = replace(BART, forward=forward_by_role)
WHISPER = replace(
    BART, project_across=project_folded, prescaled=True, length=lambda module: module.config.max_target_positions
)
