"""Encoder-decoders, and their decoders alone: BART and its relatives, Whisper, TrOCR. No RoPE.

An attention class serves the encoder, the decoder and the cross-attention between them; all of them are patched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hf_qknorm.families.inline import Attended, attend_in_batch, heads
from hf_qknorm.families.separate import output_out_proj, project
from hf_qknorm.families.style import QKV, Style, split_heads


def project_across(
    module: Any, hidden_states: Tensor, states: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    q = split_heads(module, module.q_proj(hidden_states))
    if states is None:
        return q, None, None
    return q, split_heads(module, module.k_proj(states)), split_heads(module, module.v_proj(states))


def forward_by_role(shared: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Pass `is_causal`, which the module lacks or has as False: attention functions read it where the mask is None."""
    return shared(*args, is_causal=module.is_decoder, **kwargs)


def attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0, **options: Any
) -> Attended:
    """MVP and TrOCR: the module's own computation."""

    def weigh(logits: Tensor) -> Tensor:
        return nn.functional.softmax(logits if mask is None else logits + mask, dim=-1)

    return attend_in_batch(module, q, k, v, weigh=weigh, dropout=dropout)


def unsupported_mvp(config: Any) -> str | None:
    """Return the reason why a model with this config can't be patched, or None."""
    return "use_prompt=True: its prompts are keys that no projection computes" if config.use_prompt else None


def unsupported_bigbird(config: Any) -> str | None:
    """Return the reason why a model with this config can't be patched, or None."""
    return "is_encoder_decoder=True: its encoder selects blocks of keys" if config.is_encoder_decoder else None


BART = Style(
    project,
    output_out_proj,
    QKV,
    project_across=project_across,
    dropout=lambda module: module.dropout,
    heads=heads,
)
BIGBIRD = replace(BART, forward=forward_by_role)
WHISPER = replace(BART, prescaled=True, length=lambda module: module.config.max_target_positions)
INLINE = replace(BART, forward=forward_by_role, inline=True, eager=lambda module: attend, prescaled=True)
