"""Norm and RoPE in C++ on the CPU, without gradients: one call in the place of thirty of torch's."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.norms import NORMS
from hf_qknorm.ops.types import Norm, Rotary

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
MOST_COLUMNS: Final = 256


def norm_rope_one(x: Tensor, norm: Norm, rotary: Rotary | None) -> Tensor:
    """`reference.norm_rope_one` of heads `[B, H, T, D]`, rounded once; the result is laid out as `[B, T, H, D]`.

    It has no gradient. The caller asks `attend.cpu_kernels`. Raises ValueError for tensors that do not fit x, with
    their name, and RuntimeError where the kernels can't be compiled.
    """
    name, gain, bias, _, eps, _, sharpness = norm
    kind, (cos, sin, interleaved) = NORMS.get(name), (None, None, False) if rotary is None else rotary
    switches = (False, False, False) if kind is None else (True, kind.centred, kind.summed)
    numbers = float(eps), sharpness
    result: Tensor = build.operators().norm_rope(x, *switches, gain, bias, *numbers, cos, sin, interleaved)
    return result


def takes(x: Tensor, norm: Norm, rotary: Rotary | None) -> bool:
    """Whether `norm_rope_one` takes these heads; `attend.cpu_kernels` knows whether they are trusted.

    PyTorch broadcasts other shapes, or raises its own error.
    """
    known = norm.kind == "none" or (norm.kind in NORMS and not NORMS[norm.kind].any_order)
    fits = x.device.type == "cpu" and x.dtype in DTYPES and x.shape[3] <= MOST_COLUMNS
    return known and fits and norm.blend is None and type(x) is Tensor and _fits(x, norm, rotary)


def _fits(x: Tensor, norm: Norm, rotary: Rotary | None) -> bool:
    """Whether gain, bias and angles have the shapes that the operator takes."""
    batch, heads, length, columns = x.shape
    parameters = [value for value in (norm.gain, norm.bias) if value is not None]
    if any((*value.shape,) not in ((1,), (columns,), (heads, columns)) for value in parameters):
        return False
    if rotary is None:
        return True
    cos, sin, _ = rotary
    angles = [(rows, length) for rows in (1, batch)]
    return cos.shape == sin.shape and cos.dim() == 3 and cos.shape[:2] in angles and 2 * cos.shape[2] <= columns
