"""The operators: their fields, implementations, fakes and derivatives. The kernels load at their first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.ops import fused_checks, tiled
from hf_qknorm.ops.checks import check_call
from hf_qknorm.ops.registration import HEADS, NORM_ROPE, OPTIONS, VISIBLE, Operator, Values, call_of, norms_of
from hf_qknorm.ops.types import Heads, LayerCache, Norm, Options, Rotary, Visible, laid_out

Results = Sequence[Tensor | None]
Call = tuple[Heads, Visible, Options]
Norms = tuple[Norm, Norm, Rotary | None]
PARAMETERS = ("q_gain", "q_bias", "k_gain", "k_bias")  # of the norms


def _checked_attention(values: Values) -> Call:
    call = call_of(values)
    check_call(*call)
    return call


def _checked_fused(values: Values) -> Call:
    call = call_of(values)
    fused_checks.check_attention(*call)
    if "grad" in values:
        fused_checks.check_gradients(values["q"], values["grad"], values["out"], values["normaliser"])
    return call


def _checked_norms(values: Values) -> Norms:
    q, k, norms = values["q"], values["k"], norms_of(values)
    fused_checks.check_norm_rope(q, k, *norms)
    if "dq" in values:
        fused_checks.check_head_gradients(q, k, values["dq"], values["dk"])
    if "keys" in values:
        fused_checks.check_cache(k, values["v"], values["keys"], values["values"])
        fused_checks.check_written(k, values["positions"])
    return norms


def _checked_step(values: Values) -> tuple[Heads, LayerCache, Visible, Options]:
    heads, visible, options = call_of(values)
    cache = LayerCache(*(values[x] for x in LayerCache._fields))
    fused_checks.check_step(heads, cache, visible, options)
    return heads, cache, visible, options


ATTENTION = Operator("attention", HEADS | VISIBLE | OPTIONS, "(Tensor, Tensor)", _checked_attention)
ATTENTION_BACKWARD = ATTENTION.derivative(("grad",), ("out", "lse"), (*HEADS, "sinks"))
FUSED_FIELDS = {**HEADS, **NORM_ROPE, **VISIBLE, **OPTIONS, "statistics": "bool"}
FUSED_ATTENTION = Operator("fused_attention", FUSED_FIELDS, "(Tensor, Tensor, Tensor, Tensor)", _checked_fused)
FUSED_ATTENTION_BACKWARD = FUSED_ATTENTION.derivative(("grad",), ("out", "normaliser"), (*HEADS, *PARAMETERS, "sinks"))
QUERIES_KEYS = {"q": "Tensor", "k": "Tensor?"}
CACHE = {"v": "Tensor", "keys": "Tensor(a!)", "values": "Tensor(b!)", "positions": "Tensor"}
NORM_ROPE_HEADS = Operator("norm_rope", QUERIES_KEYS | NORM_ROPE, "(Tensor, Tensor)", _checked_norms)
NORM_ROPE_BACKWARD = NORM_ROPE_HEADS.derivative(("dq", "dk"), (), (*QUERIES_KEYS, *PARAMETERS))
NORM_ROPE_INTO = Operator("norm_rope_into", {**QUERIES_KEYS, **CACHE, **NORM_ROPE}, "Tensor", _checked_norms)
LAYER_CACHE = {"keys": "Tensor(a!)", "values": "Tensor(b!)", "filled": "Tensor(c!)?"}
FUSED_STEP = Operator("fused_step", HEADS | LAYER_CACHE | NORM_ROPE | VISIBLE | OPTIONS, "Tensor", _checked_step)

ATTENTION.implement(lambda values, *call: tiled.forward(*call))
ATTENTION_BACKWARD.implement(
    lambda v, heads, visible, options: tiled.backward(v["grad"], heads, visible, options, v["out"], v["lse"])
)
ATTENTION_BACKWARD.fake(lambda v, *call: (*(v[x].new_empty(v[x].shape) for x in HEADS), _like(v["sinks"])))
FUSED_ATTENTION_BACKWARD.fake(lambda v, *call: (*(laid_out(v[x]) for x in HEADS), *_parameters(v), _like(v["sinks"])))
NORM_ROPE_HEADS.fake(lambda v, *norms: [x if x is None else x.new_empty(x.shape) for x in (v["q"], v["k"])])
NORM_ROPE_BACKWARD.fake(
    lambda v, *norms: [*(x if x is None else laid_out(x) for x in (v["q"], v["k"])), *_parameters(v)]
)
NORM_ROPE_INTO.fake(lambda values, *norms: values["q"].new_empty(values["q"].shape))
FUSED_STEP.fake(lambda values, *call: laid_out(values["q"]))


@ATTENTION.fake
def _(values: Values, heads: Heads, *_: Any) -> Results:
    q = heads.q
    return laid_out(q), q.new_empty((*q.shape[:3], 2), dtype=torch.promote_types(q.dtype, torch.float32))


@FUSED_ATTENTION.implement
def _(values: Values, heads: Heads, visible: Visible, options: Options) -> Results:
    from hf_qknorm.ops.triton import attention

    return attention.forward(heads, visible.for_kernels(heads.q.shape[0]), options, values["statistics"])


@FUSED_ATTENTION.fake
def _(values: Values, heads: Heads, *_: Any) -> Results:
    normaliser = heads.q.new_empty((*heads.q.shape[:3], 2), dtype=torch.float32)
    row = normaliser.new_empty(heads.q.shape[:3]) if values["statistics"] else None
    return laid_out(heads.q), normaliser, row, _like(row)


@FUSED_ATTENTION_BACKWARD.implement
def _(values: Values, heads: Heads, visible: Visible, options: Options) -> Results:
    from hf_qknorm.ops.triton import attention

    visible, normaliser = visible.for_kernels(heads.q.shape[0]), values["normaliser"].contiguous()
    return attention.backward(values["grad"], heads, visible, options, values["out"], normaliser)


@NORM_ROPE_HEADS.implement
def _(values: Values, q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> Results:
    from hf_qknorm.ops.triton import norm_rope

    return norm_rope.forward(values["q"], values["k"], q_norm, k_norm, rotary)[:2]


@NORM_ROPE_BACKWARD.implement
def _(values: Values, q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> Results:
    from hf_qknorm.ops.triton import norm_rope

    q, k = values["q"], values["k"]
    return norm_rope.backward(values["dq"], None if k is None else values["dk"], q, k, q_norm, k_norm, rotary)


def _check_written(values: Values) -> None:
    positions, keys = values["positions"], values["keys"]
    if keys.dim() == 4:  # others are refused for their shape
        fused_checks.check_positions(positions, keys.shape[2])


def _check_room(values: Values) -> None:
    filled, keys, q = values["filled"], values["keys"], values["q"]
    if filled is not None and keys.dim() == q.dim() == 4:
        fused_checks.check_positions(filled, keys.shape[2] - q.shape[2] + 1)


NORM_ROPE_INTO.check_numbers, FUSED_STEP.check_numbers = _check_written, _check_room


@NORM_ROPE_INTO.implement
def _(values: Values, q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> Tensor:
    from hf_qknorm.ops.triton import norm_rope

    cache = norm_rope.Cache(values["keys"], values["values"], values["v"], values["positions"].contiguous())
    return norm_rope.forward(values["q"], values["k"], q_norm, k_norm, rotary, cache=cache).q


@FUSED_STEP.implement
def _(values: Values, heads: Heads, cache: LayerCache, visible: Visible, options: Options) -> Tensor:
    from hf_qknorm.ops.triton import decode_step

    return decode_step.forward(heads, cache, visible.for_kernels(heads.q.shape[0]), options)


@cache
def _repeating(operator: Operator) -> Callable[[Values], Any]:
    from hf_qknorm.ops.triton import decode_step, plans

    growing = {FUSED_ATTENTION: decode_step.growing_attention, FUSED_STEP: decode_step.growing_step}
    return plans.Repeated(operator, growing.get(operator))


def _direct(operator: Operator, values: Values) -> Any:
    """A call as an earlier one of the same shapes, which takes the host a third of the time."""
    return _repeating(operator)(values)


for repeats in (FUSED_ATTENTION, FUSED_ATTENTION_BACKWARD, NORM_ROPE_HEADS, NORM_ROPE_BACKWARD, FUSED_STEP):
    repeats.direct = partial(_direct, repeats)


def _parameters(values: Values) -> Results:
    """Fake gradients of the norms' parameters; None where there is no parameter, or no norm that uses it."""
    return [None if values[f"{x[0]}_kind"] == "none" else _like(values[x]) for x in PARAMETERS]


def _like(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x)
