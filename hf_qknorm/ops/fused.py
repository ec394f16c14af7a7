"""The fused operators: norm, RoPE and attention in Triton kernels, as torch.library ops. Importing loads no kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops.checks import refuse_forward_mode
from hf_qknorm.ops.fused_checks import why_not_fused
from hf_qknorm.ops.fused_ops import OPERATORS, flatten
from hf_qknorm.ops.types import Norm, Rotary

__all__ = ["fused_attention", "fused_statistics", "norm_rope", "norm_rope_into", "norm_rope_one", "why_not_fused"]

NOTHING = Norm()


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_norm: Norm = NOTHING,
    k_norm: Norm = NOTHING,
    rotary: Rotary | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    window: int | None = None,
    ranges: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Norm and rotate q and k, then softmax(cap(scale·q·kᵀ))·v: `[B, H, T, D]`, laid out as `[B, T, H, D]`.

    q `[B, H, T, D]`; k, v `[B, Hk, S, D]` with H a multiple of Hk, of any strides, such as a projection's; T and S may
    differ where nothing is normed or rotated. The other arguments are those of `library.attention`. For backward it
    keeps raw q, k, v, the output and its normaliser, two numbers a row; its gradients are the same bits on each run.

    Raises ValueError for arguments that do not fit, and, with the reason, for what the kernels do not do: see
    `why_not_fused`. Raises NotImplementedError for forward-mode differentiation, and for a second derivative.
    """
    options = (scale, softcap, causal, window, dropout)
    return _attend((q, k, v), (q_norm, k_norm, rotary), ranges, sinks, options)[0]


class LogitStatistics(NamedTuple):
    """Of each query's logits `[B, H, T]`: the largest |scale·q·k| before the cap, and the weights' entropy in nats."""

    largest: Tensor
    entropy: Tensor


def fused_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_norm: Norm = NOTHING,
    k_norm: Norm = NOTHING,
    rotary: Rotary | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    window: int | None = None,
    ranges: Tensor | None = None,
    sinks: Tensor | None = None,
) -> LogitStatistics:
    """What `fused_attention` with the same arguments does to its logits; no gradient, no T×S tensor."""
    options = (scale, softcap, causal, window, 0.0)
    with torch.no_grad():
        _, _, largest, entropy = _attend((q, k, v), (q_norm, k_norm, rotary), ranges, sinks, options, statistics=True)
    return LogitStatistics(largest, entropy)


def _attend(
    heads: tuple[Tensor, Tensor, Tensor],
    ends: tuple[Norm, Norm, Rotary | None],
    ranges: Tensor | None,
    sinks: Tensor | None,
    options: tuple[float | None, float | None, bool, int | None, float],
    statistics: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, normaliser and, if wanted, `LogitStatistics`' two; else these are empty."""
    (q, k, v), (scale, softcap, causal, window, dropout) = heads, options
    parts, settings = flatten(*ends)
    refuse_forward_mode(q, k, v, sinks, *parts)
    seed = torch.randint(torch.iinfo(torch.int64).max, (1,), device=q.device) if dropout > 0 else None
    visible = (ranges, sinks, seed)
    rules = (q.shape[-1] ** -0.5 if scale is None else scale, softcap, causal, window, dropout)
    return OPERATORS.fused_attention(q, k, v, *parts, *visible, *settings, *rules, statistics)


def norm_rope(q: Tensor, k: Tensor, q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
    """Norm and rotate q `[B, H, T, D]` and k `[B, Hk, T, D]` in one launch, for what goes into a cache.

    Raises ValueError, with the reason, for what the kernels do not do: see `why_not_fused`.
    """
    parts, settings = flatten(q_norm, k_norm, rotary)
    refuse_forward_mode(q, k, *parts)
    return OPERATORS.norm_rope(q, k, *parts, *settings)


def norm_rope_one(x: Tensor, norm: Norm, rotary: Rotary | None) -> Tensor:
    """`norm_rope` of queries or keys `[B, H, T, D]` alone."""
    parts, settings = flatten(norm, NOTHING, rotary)
    refuse_forward_mode(x, *parts)
    return OPERATORS.norm_rope(x, None, *parts, *settings)[0]


def norm_rope_into(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    q_norm: Norm,
    k_norm: Norm,
    rotary: Rotary | None,
) -> Tensor:
    """`norm_rope`, with the new keys and values written to a static cache by the same launch; returns the queries.

    keys, values `[B, Hk, S, D]` are changed in place at `positions` `[T]` (int64) of their third axis. No gradient.

    Raises ValueError for tensors that need gradients, for a cache that does not fit, and, with the reason, for what the
    kernels do not do; IndexError for positions outside of the cache. On a GPU that is an assertion of the kernel's,
    which torch reports later. Nothing is written outside of the cache.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, keys, values)):
        raise ValueError("writing to a cache has no gradient: call it under torch.no_grad(), or use norm_rope")
    parts, settings = flatten(q_norm, k_norm, rotary)
    return OPERATORS.norm_rope_into(q, k, v, keys, values, positions, *parts, *settings)
