"""The operators as torch.library ops: schema, fake and autograd, so that torch.compile sees one opaque node.

Which implementation runs is decided here and nowhere else. Importing this module loads no kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_qknorm.ops import tiled
from hf_qknorm.ops.checks import check_call, check_rules
from hf_qknorm.ops.fused import (
    fused_attention,
    fused_statistics,
    norm_rope,
    norm_rope_into,
    norm_rope_one,
    why_not_fused,
)

__all__ = [
    "attention",
    "fused_attention",
    "fused_statistics",
    "norm_rope",
    "norm_rope_into",
    "norm_rope_one",
    "why_not_fused",
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    ranges: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(cap(scale·q·kᵀ) + mask)·v in linear memory, `[B, H, T, D]`, laid out as `[B, T, H, D]`.

    q `[B, H, T, D]`; k, v `[B, Hk, S, D]` with H a multiple of Hk; arguments as in `reference.attention`, except
    that `dropout` is a rate: its seed is drawn from torch's default generator, and backward repeats the mask.
    `ranges` must not decrease down the rows, neither the starts nor the stops, which is not checked.

    Raises ValueError for arguments that do not fit, and for a mask that needs a gradient (none is computed);
    NotImplementedError in forward mode (`torch.func.jvp`), and in backward for a second derivative.
    """
    check_call(q, k, v, mask, ranges, sinks, dropout)
    check_rules(scale, softcap, causal, window)
    seed = torch.randint(torch.iinfo(torch.int64).max, (1,)) if dropout > 0 else None
    out, _ = _attention(
        q,
        k,
        v,
        mask,
        ranges,
        sinks,
        seed,
        q.shape[-1] ** -0.5 if scale is None else scale,
        softcap,
        causal,
        window,
        dropout,
    )
    return out


@torch.library.custom_op("hf_qknorm::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ranges: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    options = tiled.Options(scale, softcap, causal, window, dropout)
    return tiled.forward(q, k, v, mask, ranges, sinks, seed, options)


@torch.library.custom_op("hf_qknorm::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ranges: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int | None,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = tiled.Options(scale, softcap, causal, window, dropout)
    dq, dk, dv, dsinks = tiled.backward(grad, q, k, v, mask, ranges, sinks, seed, out, lse, options)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


@_attention.register_fake
def _(q, k, v, mask, ranges, sinks, seed, scale, softcap, causal, window, dropout):  # type: ignore[no-untyped-def]
    b, h, t, d = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((b, t, h, d)).transpose(1, 2), q.new_empty((b, h, t, 2), dtype=lse_dtype)


@_attention_backward.register_fake
def _(grad, q, k, v, mask, ranges, sinks, seed, out, lse, *options):  # type: ignore[no-untyped-def]
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.scale, ctx.softcap, ctx.causal, ctx.window, ctx.dropout = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, grad, grad_lse):  # type: ignore[no-untyped-def]
    q, k, v, mask, ranges, sinks, seed, out, lse = ctx.saved_tensors
    dq, dk, dv, dsinks = _attention_backward(
        grad,
        q,
        k,
        v,
        mask,
        ranges,
        sinks,
        seed,
        out,
        lse,
        ctx.scale,
        ctx.softcap,
        ctx.causal,
        ctx.window,
        ctx.dropout,
    )
    return dq, dk, dv, None, None, None if sinks is None else dsinks, None, None, None, None, None, None


def _refuse_second(ctx, *grads):  # type: ignore[no-untyped-def]
    raise NotImplementedError(
        'hf_qknorm attention has no second derivative: for double backward use attn_implementation="hf_qknorm_eager"'
    )


_attention.register_autograd(_differentiate, setup_context=_save)
_attention_backward.register_autograd(_refuse_second)
