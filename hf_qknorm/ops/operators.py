"""The operators: their fields, implementations, fakes and derivatives. The kernels load at their first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.ops import fused_checks, tiled
from hf_qknorm.ops.checks import check_call
from hf_qknorm.ops.registration import (
    AS_CALL,
    AS_NORMS,
    HEADS,
    NORM_ROPE,
    OPTIONS,
    VISIBLE,
    Form,
    Operator,
    call_of,
)
from hf_qknorm.ops.types import Heads, LayerCache, Norm, Options, Rotary, Visible, laid_out

Results = Sequence[Tensor | None]
PARAMETERS = ("q_gain", "q_bias", "k_gain", "k_bias")  # of the norms
QUERIES_KEYS = {"q": "Tensor", "k": "Tensor?"}
LAYER_CACHE = {"keys": "Tensor(a!)", "values": "Tensor(b!)", "filled": "Tensor(c!)?"}
AS_STEP = Form(
    AS_CALL.fields | LAYER_CACHE.keys(),
    lambda values: (*call_of(values), LayerCache(*map(values.__getitem__, LayerCache._fields))),
)


def _check_fused(heads: Heads, visible: Visible, options: Options, *, statistics: bool, **results: Tensor) -> None:
    fused_checks.check_attention(heads, visible, options)
    if results:
        fused_checks.check_gradients(heads.q, **results)


def _check_norms(
    q_norm: Norm, k_norm: Norm, rotary: Rotary | None, *, q: Tensor, k: Tensor | None, **gradients: Tensor
) -> None:
    fused_checks.check_norm_rope(q, k, q_norm, k_norm, rotary)
    if gradients:
        fused_checks.check_head_gradients(q, k, **gradients)


ATTENTION = Operator("attention", HEADS | VISIBLE | OPTIONS, "(Tensor, Tensor)", AS_CALL, check_call)
ATTENTION_BACKWARD = ATTENTION.derivative(("grad",), ("out", "lse"), (*HEADS, "sinks"))
FUSED_FIELDS = {**HEADS, **NORM_ROPE, **VISIBLE, **OPTIONS, "statistics": "bool"}
FOUR = "(Tensor, Tensor, Tensor, Tensor)"
FUSED_ATTENTION = Operator("fused_attention", FUSED_FIELDS, FOUR, AS_CALL, _check_fused)
FUSED_ATTENTION_BACKWARD = FUSED_ATTENTION.derivative(("grad",), ("out", "normaliser"), (*HEADS, *PARAMETERS, "sinks"))
NORM_ROPE_HEADS = Operator("norm_rope", QUERIES_KEYS | NORM_ROPE, "(Tensor, Tensor)", AS_NORMS, _check_norms)
NORM_ROPE_BACKWARD = NORM_ROPE_HEADS.derivative(("dq", "dk"), (), (*QUERIES_KEYS, *PARAMETERS))
STEP_FIELDS = HEADS | LAYER_CACHE | NORM_ROPE | VISIBLE | OPTIONS
FUSED_STEP = Operator("fused_step", STEP_FIELDS, "Tensor", AS_STEP, fused_checks.check_step)

ATTENTION.implement(tiled.forward)
ATTENTION_BACKWARD.implement(tiled.backward)


@ATTENTION.fake
def _(heads: Heads, *_: Any) -> Results:
    q = heads.q
    return laid_out(q), q.new_empty((*q.shape[:3], 2), dtype=torch.promote_types(q.dtype, torch.float32))


@ATTENTION_BACKWARD.fake
def _(heads: Heads, visible: Visible, options: Options, **results: Tensor) -> Results:
    return *(x.new_empty(x.shape) for x in heads[:3]), _like(visible.sinks)


@FUSED_ATTENTION.implement
def _(heads: Heads, visible: Visible, options: Options, *, statistics: bool) -> Results:
    from hf_qknorm.ops.triton import attention

    return attention.forward(heads, visible.for_kernels(heads.q.shape[0]), options, statistics)


@FUSED_ATTENTION.fake
def _(heads: Heads, visible: Visible, options: Options, *, statistics: bool) -> Results:
    normaliser = heads.q.new_empty((*heads.q.shape[:3], 2), dtype=torch.float32)
    row = normaliser.new_empty(heads.q.shape[:3]) if statistics else None
    return laid_out(heads.q), normaliser, row, _like(row)


@FUSED_ATTENTION_BACKWARD.implement
def _(
    heads: Heads, visible: Visible, options: Options, *, statistics: bool, grad: Tensor, out: Tensor, normaliser: Tensor
) -> Results:
    from hf_qknorm.ops.triton import attention

    visible = visible.for_kernels(heads.q.shape[0])
    return attention.backward(grad, heads, visible, options, out, normaliser.contiguous())


@FUSED_ATTENTION_BACKWARD.fake
def _(heads: Heads, visible: Visible, options: Options, **others: Any) -> Results:
    return *map(laid_out, heads[:3]), *_parameters(heads.q_norm, heads.k_norm), _like(visible.sinks)


@NORM_ROPE_HEADS.implement
def _(q_norm: Norm, k_norm: Norm, rotary: Rotary | None, *, q: Tensor, k: Tensor | None) -> Results:
    from hf_qknorm.ops.triton import norm_rope

    return norm_rope.forward(q, k, q_norm, k_norm, rotary)[:2]


def fake_heads(*norms: Any, q: Tensor, k: Tensor | None) -> Results:
    """Normed and rotated heads, without their numbers."""
    return [x if x is None else x.new_empty(x.shape) for x in (q, k)]


NORM_ROPE_HEADS.fake(fake_heads)


@NORM_ROPE_BACKWARD.implement
def _(
    q_norm: Norm, k_norm: Norm, rotary: Rotary | None, *, q: Tensor, k: Tensor | None, dq: Tensor, dk: Tensor
) -> Results:
    from hf_qknorm.ops.triton import norm_rope

    return norm_rope.backward(dq, None if k is None else dk, q, k, q_norm, k_norm, rotary)


def fake_head_gradients(q_norm: Norm, k_norm: Norm, *_: Any, q: Tensor, k: Tensor | None, **grads: Tensor) -> Results:
    """Gradients of raw heads and of their norms' parameters, without their numbers."""
    return [*(x if x is None else laid_out(x) for x in (q, k)), *_parameters(q_norm, k_norm)]


NORM_ROPE_BACKWARD.fake(fake_head_gradients)


@FUSED_STEP.implement
def _(heads: Heads, visible: Visible, options: Options, cache: LayerCache) -> Tensor:
    from hf_qknorm.ops.triton import decode_step

    return decode_step.forward(heads, cache, visible.for_kernels(heads.q.shape[0]), options)


@FUSED_STEP.fake
def _(heads: Heads, *_: Any) -> Tensor:
    return laid_out(heads.q)


FUSED_STEP.check_numbers = fused_checks.check_room


@cache
def _repeating(operator: Operator) -> Callable[..., Any]:
    from hf_qknorm.ops.triton import decode_step, plans

    growing = {FUSED_ATTENTION: decode_step.growing_attention, FUSED_STEP: decode_step.growing_step}
    return plans.Repeated(operator, growing.get(operator))


# A call as an earlier one of the same shapes takes the host a third of the time.
for repeats in (FUSED_ATTENTION, FUSED_ATTENTION_BACKWARD, NORM_ROPE_HEADS, NORM_ROPE_BACKWARD, FUSED_STEP):
    repeats.direct = lambda values, formed=None, operator=repeats: _repeating(operator)(values, formed)


def _parameters(*norms: Norm) -> Results:
    """Fake gradients of the norms' gains and biases; None where there is none, or no norm that uses it."""
    return [None if norm.kind == "none" else _like(x) for norm in norms for x in (norm.gain, norm.bias)]


def _like(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x)
