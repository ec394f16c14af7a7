"""A norm of heads in the fewest calls of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_qknorm.ops.norms import NORMS, PLAIN, Shape
from hf_qknorm.ops.reference import head_norm
from hf_qknorm.ops.types import Norm


def apply_norm(x: Tensor, norm: Norm) -> Tensor:
    """Normalise heads `[..., H, D]` to the numbers of `reference.head_norm`.

    Without gradients, `torch.rms_norm` computes a norm of RMSNorm's form. Its gradient of a row of zeros is 1/√eps
    times the output's; `head_norm` has a gradient of zero there.
    """
    name, gain, bias, eps, p, knee = norm
    shape, kind = _shape(knee), NORMS.get(name)
    knee = None if shape == PLAIN else knee
    plain = shape is not None and not shape.power and shape.sharpness == 1
    if torch.is_grad_enabled() or not plain or kind is None or kind.summed or kind.any_order:
        return head_norm(x, name, gain, bias, eps, p, knee)
    assert shape is not None
    columns, eps = x.shape[-1:], eps * float(2.0**shape.epsilon)
    alone = not kind.centred and bias is None
    if alone and gain is not None and gain.shape == columns and gain.dtype == x.dtype:
        return torch.rms_norm(x, columns, gain, eps)
    y = x if x.dtype == torch.float64 else x.float()
    y = y - y.mean(-1, keepdim=True) if kind.centred else y
    y = torch.rms_norm(y, columns, None, eps)
    y = y if gain is None else gain.to(y.dtype) * y
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype)


def _shape(knee: Tensor | None) -> Shape | None:
    """The norm's shape; None where only a tensor has it, in a trace, under torch.func, or on another device."""
    if knee is None:
        return PLAIN
    here = not torch.compiler.is_compiling() and type(knee) is Tensor and knee.device.type == "cpu"
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if not here or tracing or torch._C._functorch.is_functorch_wrapped_tensor(knee):
        return None
    return Shape.of(knee)
