"""Norm and RoPE of heads in C++ on the CPU: the operator `cpu_norm_rope`, and the calls that it takes.

All arithmetic is in fp32, whatever the dtype of the heads, with one rounding at the end.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from hf_qknorm.ops import operators
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.norms import NORMS
from hf_qknorm.ops.operators import PARAMETERS, QUERIES_KEYS, Results
from hf_qknorm.ops.registration import AS_NORMS, NO_ROTARY, NORM_ROPE, Operator, flatten_norms, is_plain
from hf_qknorm.ops.types import DTYPES, MOST_COLUMNS, Heads, LayerCache, Norm, Options, Rotary, Visible

NO_NORM: Final = Norm()


def norm_rope(heads: Heads) -> tuple[Tensor, Tensor]:
    """`reference.norm_rope`, rounded once: q `[B, H, T, D]` and k `[B, Hk, T, D]`, both contiguous.

    Attention in C++ reads them faster so than laid out as `[B, T, H, D]`. The caller asks `attend.cpu_kernels`.

    Raises ValueError for tensors that do not fit, by name, and RuntimeError where the kernels can't be compiled.
    """
    q, k, _, q_norm, k_norm, rotary = heads
    angles = () if rotary is None else rotary[:2]
    if is_plain((q, k, *q_norm[1:3], *k_norm[1:3], *angles)):  # a step of generation: see `attention.attention`
        return _forward(q, q_norm, rotary), _forward(k, k_norm, rotary)
    return CPU_NORM_ROPE({"q": q, "k": k, **flatten_norms(q_norm, k_norm, rotary)})


def norm_rope_one(x: Tensor, norm: Norm, rotary: Rotary | None) -> Tensor:
    """`norm_rope` of queries or keys `[B, H, T, D]` alone."""
    return CPU_NORM_ROPE({"q": x, "k": None, **flatten_norms(norm, NO_NORM, rotary)})[0]


def takes(x: Tensor, norm: Norm, rotary: Rotary | None) -> bool:
    """Whether the kernels take these heads; `attend.cpu_kernels` knows whether they are trusted.

    PyTorch broadcasts other shapes, or raises its own error.
    """
    return x.device.type == "cpu" and type(x) is Tensor and _fits(x, norm, rotary)


def _fits(x: Tensor, norm: Norm, rotary: Rotary | None) -> bool:
    """Whether kind and dtype are known, and gain, bias and angles have the shapes that the operator takes."""
    batch, heads, length, columns = x.shape
    known = norm.kind == "none" or (norm.kind in NORMS and not NORMS[norm.kind].any_order)
    if not known or norm.blend is not None or x.dtype not in DTYPES or columns > MOST_COLUMNS:
        return False
    parameters = [value for value in (norm.gain, norm.bias) if value is not None]
    if any((*value.shape,) not in ((1,), (columns,), (heads, columns)) for value in parameters):
        return False
    if rotary is None:
        return True
    cos, sin, _ = rotary
    angles = [(rows, length) for rows in (1, batch)]
    return cos.shape == sin.shape and cos.dim() == 3 and cos.shape[:2] in angles and 2 * cos.shape[2] <= columns


def _check(
    q_norm: Norm, k_norm: Norm, rotary: Rotary | None, *, q: Tensor, k: Tensor | None, **gradients: Tensor
) -> None:
    for side, x, norm in (("q", q, q_norm), ("k", k, k_norm)):
        if x is not None and not _fits(x, norm, rotary):
            raise ValueError(
                f"the C++ kernels do not take {side} {list(x.shape)} in {x.dtype} with {norm.kind!r} and these "
                "parameters and angles: use reference.norm_rope"
            )


def append(heads: Heads, into: LayerCache) -> Tensor:
    """`norm_rope` in a step of generation: writes keys and values to the last rows of a cache, and returns the queries.

    There are no gradients. The caller asks `attend.cpu_kernels`.

    Raises ValueError for tensors that do not fit, by name, before the cache changes.
    """
    return build.overload("append")(*_append_arguments(heads, into))


def step(heads: Heads, into: LayerCache, visible: Visible, options: Options) -> Tensor:
    """`append`, and attention of the queries to the whole cache without dropout: `[B, H, T, D]` as `[B, T, H, D]`."""
    return build.overload("step")(*_append_arguments(heads, into), *visible[:2], *options[:4])


def _append_arguments(heads: Heads, into: LayerCache) -> tuple[Any, ...]:
    q, k, v, q_norm, k_norm, rotary = heads
    return q, k, v, *into[:2], *_norm_arguments(q_norm), *_norm_arguments(k_norm), *(rotary or NO_ROTARY)


def _norm_arguments(norm: Norm) -> tuple[Any, ...]:
    name, gain, bias, _, eps, _, sharpness = norm
    kind = NORMS.get(name)
    switches = (False, False, False) if kind is None else (True, kind.centred, kind.summed)
    return *switches, gain, bias, float(eps), sharpness


def _arguments(x: Tensor, norm: Norm, rotary: Rotary | None) -> tuple[Any, ...]:
    return x, *_norm_arguments(norm), *(rotary or NO_ROTARY)


def _forward(x: Tensor, norm: Norm, rotary: Rotary | None) -> Tensor:
    return build.operators().norm_rope(*_arguments(x, norm, rotary))


def _backward(
    x: Tensor, norm: Norm, rotary: Rotary | None, grad: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, gain and bias."""
    dx, *sums = build.operators().norm_rope_backward(*_arguments(x, norm, rotary), grad)
    dgain, dbias = (
        None if value is None or norm.kind == "none" else total.sum_to_size(value.shape).to(value.dtype)
        for value, total in zip((norm.gain, norm.bias), sums, strict=True)
    )
    return dx, dgain, dbias


CPU_NORM_ROPE = Operator("cpu_norm_rope", QUERIES_KEYS | NORM_ROPE, "(Tensor, Tensor)", AS_NORMS, _check)
CPU_NORM_ROPE_BACKWARD = CPU_NORM_ROPE.derivative(("dq", "dk"), (), (*QUERIES_KEYS, *PARAMETERS))
CPU_NORM_ROPE.fake(operators.fake_heads)
CPU_NORM_ROPE_BACKWARD.fake(operators.fake_head_gradients)


@CPU_NORM_ROPE.implement
def _(q_norm: Norm, k_norm: Norm, rotary: Rotary | None, *, q: Tensor, k: Tensor | None) -> Results:
    return _forward(q, q_norm, rotary), None if k is None else _forward(k, k_norm, rotary)


@CPU_NORM_ROPE_BACKWARD.implement
def _(
    q_norm: Norm, k_norm: Norm, rotary: Rotary | None, *, q: Tensor, k: Tensor | None, dq: Tensor, dk: Tensor
) -> Results:
    of_q = _backward(q, q_norm, rotary, dq)
    of_k = (None, None, None) if k is None else _backward(k, k_norm, rotary, dk)
    return of_q[0], of_k[0], *of_q[1:], *of_k[1:]
