"""Norm and RoPE of heads in C++ on the CPU, and the heads that they take.

All arithmetic is in fp32, whatever the dtype of the heads, with one rounding at the end.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from hf_qknorm.ops.checks import refuse_forward_mode
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.norms import NORMS, PLAIN, Shape
from hf_qknorm.ops.registration import differentiable
from hf_qknorm.ops.types import DTYPES, MOST_COLUMNS, Heads, Norm, Rotary

# The arguments of the compiled operator `norm_rope`
FIELDS: Final = {
    **{"x": "Tensor", "normed": "bool", "centred": "bool", "gain": "Tensor?", "bias": "Tensor?", "eps": "float"},
    **{"sharpness": "float", "length": "float", "cos": "Tensor?", "sin": "Tensor?", "interleaved": "bool"},
}


def norm_rope(heads: Heads) -> tuple[Tensor, Tensor]:
    """`reference.norm_rope`, rounded once: q `[B, H, T, D]` and k `[B, Hk, T, D]`, both contiguous.

    Attention in C++ reads them faster so than laid out as `[B, T, H, D]`.
    """
    q, k, _, q_norm, k_norm, rotary = heads
    run = build.overload("differentiable_norm_rope" if torch.is_grad_enabled() else "norm_rope")
    columns = q.shape[-1]
    of_queries, of_keys = (q, *_arguments(q_norm, columns, rotary)), (k, *_arguments(k_norm, columns, rotary))
    refuse_forward_mode((*of_queries, *of_keys))
    return run(*of_queries), run(*of_keys)


def why_not(heads: Heads) -> str | None:
    """The reason why the kernels do not norm and rotate these heads now, or None; as `attention.why_not`."""
    q, k, _, q_norm, k_norm, rotary = heads
    if torch.compiler.is_compiling():
        return "a compiler fuses PyTorch's operations with those around them"
    if not (q.is_cpu and type(q) is Tensor and _fits(q, q_norm, rotary) and _fits(k, k_norm, rotary)):
        return f"the C++ kernels do not take heads {list(q.shape)} in {q.dtype} with these norms and angles"
    return build.why_not(wait=torch.is_grad_enabled())


def _fits(x: Tensor, norm: Norm, rotary: Rotary | None) -> bool:
    """Whether kind and dtype are known, and gain, bias and angles have the shapes that the operator takes."""
    batch, heads, length, columns = x.shape
    known = norm.kind == "none" or (norm.kind in NORMS and not NORMS[norm.kind].any_order)
    if not known or x.dtype not in DTYPES or columns > MOST_COLUMNS:
        return False
    parameters = [value for value in (norm.gain, norm.bias) if value is not None]
    if any((*value.shape,) not in ((1,), (columns,), (heads, columns)) for value in parameters):
        return False
    if rotary is None:
        return True
    cos, sin, _ = rotary
    angles = [(rows, length) for rows in (1, batch)]
    return cos.shape == sin.shape and cos.dim() == 3 and cos.shape[:2] in angles and 2 * cos.shape[2] <= columns


def _arguments(norm: Norm, columns: int, rotary: Rotary | None) -> tuple[Any, ...]:
    """The operator's arguments behind x: the norm's shape in numbers, as it may move before the backward pass."""
    name, gain, bias, eps, _, knee = norm
    angles = rotary or (None, None, False)
    if (kind := NORMS.get(name)) is None:
        return False, False, gain, bias, eps, 1.0, 1.0, *angles
    shape = PLAIN if knee is None else Shape.of(knee)
    length = shape.length(eps, 2.0, columns if kind.summed else 1)
    return True, kind.centred, gain, bias, eps * 2.0**shape.epsilon, shape.sharpness, length, *angles


def _backward(grad: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """Gradients of x, gain and bias."""
    normed, _, gain, bias, *_ = arguments
    dx, *sums = build.overload("norm_rope_backward")(x, *arguments, grad)
    return dx, *(
        None if value is None or not normed else total.sum_to_size(value.shape).to(value.dtype)
        for value, total in zip((gain, bias), sums, strict=True)
    )


@build.once_loaded
def _add(compiled: build.Overloads) -> build.Overloads:
    run = differentiable(FIELDS, ("x", "gain", "bias"), compiled["norm_rope"], _backward, kept=0)
    return {"differentiable_norm_rope": run}
