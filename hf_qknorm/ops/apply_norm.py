"""A norm of heads in the fewest calls of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_qknorm.ops.norms import NORMS
from hf_qknorm.ops.reference import head_norm
from hf_qknorm.ops.types import Norm


def apply_norm(x: Tensor, norm: Norm) -> Tensor:
    """Normalise heads `[..., H, D]` to the numbers of `reference.head_norm`.

    Without gradients, `torch.rms_norm` computes it. Its gradient of a row of zeros is 1/√eps times the output's;
    `head_norm` has a gradient of zero there.
    """
    name, gain, bias, blend, eps, p, sharpness = norm
    kind = NORMS.get(name)
    number = None if torch.is_grad_enabled() or blend is not None or sharpness > 1 else _number(eps)
    if number is None or kind is None or kind.any_order:
        return head_norm(x, name, gain, bias, eps, p, blend, sharpness)
    columns, plain = x.shape[-1:], not (kind.centred or kind.summed or bias is not None)
    if plain and gain is not None and gain.shape == columns and gain.dtype == x.dtype:
        return torch.rms_norm(x, columns, gain, number)
    y = x if x.dtype == torch.float64 else x.float()
    y = y - y.mean(-1, keepdim=True) if kind.centred else y
    y = torch.rms_norm(y, columns, None, number)
    y = y * columns[0] ** -0.5 if kind.summed else y
    y = y if gain is None else gain.to(y.dtype) * y
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype)


def _number(eps: float | Tensor) -> float | None:
    """eps as a number; None for a tensor that a trace or another device holds."""
    if not isinstance(eps, Tensor):
        return eps
    here = not torch.compiler.is_compiling() and type(eps) is Tensor and eps.device.type == "cpu"
    return float(eps) if here else None
