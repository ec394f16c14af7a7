"""The operators: their fields, implementations, fakes and derivatives. The kernels load at their first call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_qknorm.ops import fused_checks, tiled
from hf_qknorm.ops.checks import check_call
from hf_qknorm.ops.registration import HEADS, NORM_ROPE, OPTIONS, VISIBLE, Operator, Values, call_of, norms_of
from hf_qknorm.ops.types import laid_out

Results = Sequence[Tensor | None]
PARAMETERS = ("q_gain", "q_bias", "k_gain", "k_bias")  # of the norms


def _check_attention(values: Values) -> None:
    check_call(*call_of(values))


def _check_fused(values: Values) -> None:
    heads, visible, options = call_of(values)
    fused_checks.check_attention(heads, visible, options)
    if "grad" in values:
        fused_checks.check_gradients(heads.q, values["grad"], values["out"], values["normaliser"])


def _check_norm_rope(values: Values) -> None:
    q, k = values["q"], values["k"]
    fused_checks.check_norm_rope(q, k, *norms_of(values))
    if "dq" in values:
        fused_checks.check_head_gradients((q, values["dq"]), (k, values["dk"]))
    if "keys" in values:
        fused_checks.check_cache(k, values["v"], values["keys"], values["values"], values["positions"])


ATTENTION = Operator("attention", HEADS | VISIBLE | OPTIONS, "(Tensor, Tensor)", _check_attention)
ATTENTION_BACKWARD = ATTENTION.derivative(("grad",), ("out", "lse"), (*HEADS, "sinks"))
FUSED_FIELDS = {**HEADS, **NORM_ROPE, **VISIBLE, **OPTIONS, "statistics": "bool"}
FUSED_ATTENTION = Operator("fused_attention", FUSED_FIELDS, "(Tensor, Tensor, Tensor, Tensor)", _check_fused)
FUSED_ATTENTION_BACKWARD = FUSED_ATTENTION.derivative(("grad",), ("out", "normaliser"), (*HEADS, *PARAMETERS, "sinks"))
QUERIES_KEYS = {"q": "Tensor", "k": "Tensor?"}
CACHE = {"v": "Tensor", "keys": "Tensor(a!)", "values": "Tensor(b!)", "positions": "Tensor"}
NORM_ROPE_HEADS = Operator("norm_rope", QUERIES_KEYS | NORM_ROPE, "(Tensor, Tensor)", _check_norm_rope)
NORM_ROPE_BACKWARD = NORM_ROPE_HEADS.derivative(("dq", "dk"), (), (*QUERIES_KEYS, *PARAMETERS))
NORM_ROPE_INTO = Operator("norm_rope_into", {**QUERIES_KEYS, **CACHE, **NORM_ROPE}, "Tensor", _check_norm_rope)


@ATTENTION.implement
def _(values: Values) -> Results:
    return tiled.forward(*call_of(values))


@ATTENTION.fake
def _(values: Values) -> Results:
    q = values["q"]
    return laid_out(q), q.new_empty((*q.shape[:3], 2), dtype=torch.promote_types(q.dtype, torch.float32))


@ATTENTION_BACKWARD.implement
def _(values: Values) -> Results:
    return tiled.backward(values["grad"], *call_of(values), values["out"], values["lse"])


@ATTENTION_BACKWARD.fake
def _(values: Values) -> Results:
    sinks = values["sinks"]
    return *(values[x].new_empty(values[x].shape) for x in HEADS), None if sinks is None else torch.empty_like(sinks)


@FUSED_ATTENTION.implement
def _(values: Values) -> Results:
    from hf_qknorm.ops.triton import attention

    heads, visible, options = call_of(values)
    return attention.forward(heads, visible.for_kernels(len(heads.q)), options, values["statistics"])


@FUSED_ATTENTION.fake
def _(values: Values) -> Results:
    q = values["q"]
    normaliser = q.new_empty((*q.shape[:3], 2), dtype=torch.float32)
    row = normaliser.new_empty(q.shape[:3]) if values["statistics"] else None
    return laid_out(q), normaliser, row, None if row is None else torch.empty_like(row)


@FUSED_ATTENTION_BACKWARD.implement
def _(values: Values) -> Results:
    from hf_qknorm.ops.triton import attention

    heads, visible, options = call_of(values)
    visible, normaliser = visible.for_kernels(len(heads.q)), values["normaliser"].contiguous()
    return attention.backward(values["grad"], heads, visible, options, values["out"], normaliser)


@FUSED_ATTENTION_BACKWARD.fake
def _(values: Values) -> Results:
    sinks = values["sinks"]
    heads = [laid_out(values[x]) for x in HEADS]
    return *heads, *_fake_parameters(values), None if sinks is None else torch.empty_like(sinks)


@NORM_ROPE_HEADS.implement
def _(values: Values) -> Results:
    from hf_qknorm.ops.triton import norm_rope

    return norm_rope.forward(values["q"], values["k"], *norms_of(values))[:2]


@NORM_ROPE_HEADS.fake
def _(values: Values) -> Results:
    return [x if x is None else x.new_empty(x.shape) for x in (values["q"], values["k"])]


@NORM_ROPE_BACKWARD.implement
def _(values: Values) -> Results:
    from hf_qknorm.ops.triton import norm_rope

    q, k = values["q"], values["k"]
    return norm_rope.backward(values["dq"], None if k is None else values["dk"], q, k, *norms_of(values))


@NORM_ROPE_BACKWARD.fake
def _(values: Values) -> Results:
    heads = [x if x is None else laid_out(x) for x in (values["q"], values["k"])]
    return *heads, *_fake_parameters(values)


@NORM_ROPE_INTO.implement
def _(values: Values) -> Tensor:
    from hf_qknorm.ops.triton import norm_rope

    keys, positions = values["keys"], values["positions"]
    fused_checks.check_positions(positions, keys.shape[2])
    cache = norm_rope.Cache(keys, values["values"], values["v"], positions.contiguous())
    return norm_rope.forward(values["q"], values["k"], *norms_of(values), cache=cache).q


@NORM_ROPE_INTO.fake
def _(values: Values) -> Tensor:
    return values["q"].new_empty(values["q"].shape)


def _fake_parameters(values: Values) -> Results:
    """Fake gradients of the norms' parameters; None where there is no parameter, or no norm that uses it."""
    found = {x: None if values[f"{x[0]}_kind"] == "none" else values[x] for x in PARAMETERS}
    return [x if x is None else torch.empty_like(x) for x in found.values()]
