"""The operators: their fields, implementations, fakes and derivatives. The kernels load at their first call."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_qknorm.ops import fused_checks, tiled
from hf_qknorm.ops.checks import check_heads, check_options, check_visible
from hf_qknorm.ops.registration import (
    HEADS,
    NORM_ROPE,
    OPTIONS,
    VISIBLE,
    Operator,
    Values,
    call_of,
    differentiate,
    norms_of,
)
from hf_qknorm.ops.types import laid_out

PARAMETERS = ("q_gain", "q_bias", "k_gain", "k_bias")  # of the norms


def _check_attention(values: Values) -> None:
    heads, visible, options = call_of(values)
    check_heads(heads.q, heads.k, heads.v)
    check_visible(heads, visible)
    check_options(options)


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
ATTENTION_BACKWARD = Operator(
    "attention_backward",
    {"grad": "Tensor", "out": "Tensor", "lse": "Tensor", **HEADS, **VISIBLE, **OPTIONS},
    "Tensor[]",
    _check_attention,
)
FUSED_ATTENTION = Operator(
    "fused_attention",
    {**HEADS, **NORM_ROPE, **VISIBLE, **OPTIONS, "statistics": "bool"},
    "(Tensor, Tensor, Tensor, Tensor)",
    _check_fused,
)
FUSED_ATTENTION_BACKWARD = Operator(
    "fused_attention_backward",
    {"grad": "Tensor", "out": "Tensor", "normaliser": "Tensor", **HEADS, **NORM_ROPE, **VISIBLE, **OPTIONS},
    "Tensor[]",
    _check_fused,
)
QUERIES_KEYS = {"q": "Tensor", "k": "Tensor?"}
CACHE = {"v": "Tensor", "keys": "Tensor(a!)", "values": "Tensor(b!)", "positions": "Tensor"}
NORM_ROPE_HEADS = Operator("norm_rope", QUERIES_KEYS | NORM_ROPE, "(Tensor, Tensor)", _check_norm_rope)
NORM_ROPE_BACKWARD = Operator(
    "norm_rope_backward", {"dq": "Tensor", "dk": "Tensor?", **QUERIES_KEYS, **NORM_ROPE}, "Tensor[]", _check_norm_rope
)
NORM_ROPE_INTO = Operator("norm_rope_into", {**QUERIES_KEYS, **CACHE, **NORM_ROPE}, "Tensor", _check_norm_rope)


@ATTENTION.implement
def _(values: Values) -> tuple[Tensor, Tensor]:
    return tiled.forward(*call_of(values))


@ATTENTION.fake
def _(values: Values) -> tuple[Tensor, Tensor]:
    q = values["q"]
    return laid_out(q), q.new_empty((*q.shape[:3], 2), dtype=torch.promote_types(q.dtype, torch.float32))


@ATTENTION_BACKWARD.implement
def _(values: Values) -> list[Tensor]:
    return _tensors(values["q"], tiled.backward(values["grad"], *call_of(values), values["out"], values["lse"]))


@ATTENTION_BACKWARD.fake
def _(values: Values) -> list[Tensor]:
    return [values[x].new_empty(values[x].shape) for x in HEADS] + _parameters(values, "sinks")


@FUSED_ATTENTION.implement
def _(values: Values) -> tuple[Tensor, ...]:
    from hf_qknorm.ops.triton import attention

    heads, visible, options = call_of(values)
    result = attention.forward(heads, visible.for_kernels(len(heads.q)), options, values["statistics"])
    return tuple(_tensors(result.normaliser, result))


@FUSED_ATTENTION.fake
def _(values: Values) -> tuple[Tensor, ...]:
    q = values["q"]
    normaliser = q.new_empty((*q.shape[:3], 2), dtype=torch.float32)
    largest, entropy = (normaliser.new_empty(q.shape[:3] if values["statistics"] else 0) for _ in range(2))
    return laid_out(q), normaliser, largest, entropy


@FUSED_ATTENTION_BACKWARD.implement
def _(values: Values) -> list[Tensor]:
    from hf_qknorm.ops.triton import attention

    heads, visible, options = call_of(values)
    visible, normaliser = visible.for_kernels(len(heads.q)), values["normaliser"].contiguous()
    return _tensors(heads.q, attention.backward(values["grad"], heads, visible, options, values["out"], normaliser))


@FUSED_ATTENTION_BACKWARD.fake
def _(values: Values) -> list[Tensor]:
    return [laid_out(values[x]) for x in HEADS] + _parameters(values, *PARAMETERS, "sinks")


@NORM_ROPE_HEADS.implement
def _(values: Values) -> tuple[Tensor, Tensor]:
    from hf_qknorm.ops.triton import norm_rope

    made = norm_rope.forward(values["q"], values["k"], *norms_of(values))
    return made.q, made.q.new_empty(0) if made.k is None else made.k


@NORM_ROPE_HEADS.fake
def _(values: Values) -> tuple[Tensor, Tensor]:
    q, k = values["q"], values["k"]
    return q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)


@NORM_ROPE_BACKWARD.implement
def _(values: Values) -> list[Tensor]:
    from hf_qknorm.ops.triton import norm_rope

    q, k = values["q"], values["k"]
    return _tensors(q, norm_rope.backward(values["dq"], None if k is None else values["dk"], q, k, *norms_of(values)))


@NORM_ROPE_BACKWARD.fake
def _(values: Values) -> list[Tensor]:
    q, k = values["q"], values["k"]
    return [laid_out(q), q.new_empty(0) if k is None else laid_out(k), *_parameters(values, *PARAMETERS)]


@NORM_ROPE_INTO.implement
def _(values: Values) -> Tensor:
    from hf_qknorm.ops.triton import norm_rope

    keys, positions = values["keys"], values["positions"]
    fused_checks.check_positions(positions, keys.shape[2])
    cache = norm_rope.Cache(keys, values["values"], values["v"], positions.contiguous())
    return norm_rope.forward(values["q"], values["k"], *norms_of(values), cache=cache).q


@NORM_ROPE_INTO.fake
def _(values: Values) -> Tensor:
    q: Tensor = values["q"]
    return q.new_empty(q.shape)


def _tensors(like: Tensor, found: tuple[Tensor | None, ...]) -> list[Tensor]:
    """What a schema can return: `[0]` for None."""
    return [like.new_empty(0) if x is None else x for x in found]


def _parameters(values: Values, *fields: str) -> list[Tensor]:
    """Empty gradients of these fields; `[0]` for one without a value, and for a parameter of the norm "none"."""
    found = []
    for field in fields:
        unused = values[field] is None or values.get(f"{field[0]}_kind") == "none" and field in PARAMETERS
        found.append(values["q"].new_empty(0) if unused else torch.empty_like(values[field]))
    return found


differentiate(ATTENTION, ATTENTION_BACKWARD, ("out", "lse"), (*HEADS, "sinks"))
differentiate(FUSED_ATTENTION, FUSED_ATTENTION_BACKWARD, ("out", "normaliser"), (*HEADS, *PARAMETERS, "sinks"))
differentiate(NORM_ROPE_HEADS, NORM_ROPE_BACKWARD, (), (*QUERIES_KEYS, *PARAMETERS))
