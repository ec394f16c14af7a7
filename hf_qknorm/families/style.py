"""What a family file says: how one style of attention module projects, joins its heads, and drops weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Projected = tuple[Tensor, Tensor, Tensor]


def _eager(module: Any) -> Callable[..., Any]:
    return module.modelling.eager_attention_forward


def _dropout(module: Any) -> float:
    return module.attention_dropout


@dataclass(frozen=True)
class Style:
    """How a kind of attention module differs from the shared forward.

    `project` maps hidden states `[B, T, C]` to q `[B, T, H, D]` and k, v `[B, T, Hk, D]`; `output` maps
    `[B, T, H·D]` back to `[B, T, C]`; `dropout` is the rate on the weights; `eager` the model's own function for
    `attn_implementation="eager"`; `weights` the projections that lead to q, k and v; `interleaved` says that RoPE
    turns neighbours, not halves.
    """

    project: Callable[[nn.Module, Tensor], Projected]
    output: Callable[[nn.Module, Tensor], Tensor]
    weights: tuple[str, ...]
    dropout: Callable[[nn.Module], float] = _dropout
    eager: Callable[[nn.Module], Callable[..., Any]] = _eager
    interleaved: bool = False
