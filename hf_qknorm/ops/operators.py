"""The operators of the Triton kernels: their fields, implementations, fakes and derivatives. The kernels load late.

None checks its arguments: they come from calls that have been checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.ops.registration import (
    CALL,
    HEADS,
    NORM_ROPE,
    PARAMETERS,
    QUERIES_KEYS,
    Operator,
    differentiable,
    unpack,
    unpack_norms,
)
from hf_qknorm.ops.types import Norm, laid_out

Results = Sequence[Tensor | None]
STATISTICS = {"statistics": "bool"}
RESULTS = {"grad": "Tensor", "out": "Tensor", "normaliser": "Tensor"}

FUSED_ATTENTION = Operator("fused_attention", CALL | STATISTICS, "(Tensor, Tensor, Tensor, Tensor)")
FUSED_ATTENTION_BACKWARD = Operator("fused_attention_backward", RESULTS | CALL | STATISTICS, "Tensor[]")
NORM_ROPE_HEADS = Operator("norm_rope", QUERIES_KEYS | NORM_ROPE, "(Tensor, Tensor)")
NORM_ROPE_BACKWARD = Operator(
    "norm_rope_backward", {"dq": "Tensor", "dk": "Tensor"} | QUERIES_KEYS | NORM_ROPE, "Tensor[]"
)
fused_attention = differentiable(
    CALL | STATISTICS, (*HEADS, *PARAMETERS, "sinks"), FUSED_ATTENTION.overload, FUSED_ATTENTION_BACKWARD, kept=2
)
norm_rope = differentiable(
    QUERIES_KEYS | NORM_ROPE, (*QUERIES_KEYS, *PARAMETERS), NORM_ROPE_HEADS.overload, NORM_ROPE_BACKWARD, kept=0
)


@FUSED_ATTENTION.implement
def _(*arguments: Any) -> Results:
    from hf_qknorm.ops.triton import attention

    heads, visible, options = unpack(arguments[:-1])
    return attention.forward(heads, visible.for_kernels(len(heads.q)), options, arguments[-1])


@FUSED_ATTENTION.fake
def _(*arguments: Any) -> Results:
    q, statistics = arguments[0], arguments[-1]
    normaliser = q.new_empty((*q.shape[:3], 2), dtype=torch.float32)
    row = normaliser.new_empty(q.shape[:3]) if statistics else None
    return laid_out(q), normaliser, row, _like(row)


@FUSED_ATTENTION_BACKWARD.implement
def _(grad: Tensor, out: Tensor, normaliser: Tensor, *arguments: Any) -> Results:
    from hf_qknorm.ops.triton import attention

    heads, visible, options = unpack(arguments[:-1])
    return attention.backward(grad, heads, visible.for_kernels(len(heads.q)), options, out, normaliser)


@FUSED_ATTENTION_BACKWARD.fake
def _(grad: Tensor, out: Tensor, normaliser: Tensor, *arguments: Any) -> Results:
    heads, visible, _ = unpack(arguments[:-1])
    return *map(laid_out, heads[:3]), *fake_parameters(heads.q_norm, heads.k_norm), _like(visible.sinks)


@NORM_ROPE_HEADS.implement
def _(q: Tensor, k: Tensor | None, *norms: Any) -> Results:
    from hf_qknorm.ops.triton import norm_rope

    return norm_rope.forward(q, k, *unpack_norms(norms))[:2]


@NORM_ROPE_HEADS.fake
def _(q: Tensor, k: Tensor | None, *norms: Any) -> Results:
    return [x if x is None else x.new_empty(x.shape) for x in (q, k)]


@NORM_ROPE_BACKWARD.implement
def _(dq: Tensor, dk: Tensor, q: Tensor, k: Tensor | None, *norms: Any) -> Results:
    from hf_qknorm.ops.triton import norm_rope

    return norm_rope.backward(dq, None if k is None else dk, q, k, *unpack_norms(norms))


@NORM_ROPE_BACKWARD.fake
def _(dq: Tensor, dk: Tensor, q: Tensor, k: Tensor | None, *norms: Any) -> Results:
    q_norm, k_norm, _ = unpack_norms(norms)
    return [*(x if x is None else laid_out(x) for x in (q, k)), *fake_parameters(q_norm, k_norm)]


def fake_parameters(*norms: Norm) -> Results:
    """Fake gradients of the norms' gains and biases; None where there is none, or no norm that uses it."""
    return [None if norm.kind == "none" else _like(x) for norm in norms for x in (norm.gain, norm.bias)]


def _like(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x)
