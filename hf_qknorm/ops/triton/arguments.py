"""Norms and rotations as kernels unpack them, tensors with their strides, and the sums of what programs left."""

from __future__ import annotations

from torch import Tensor

from hf_qknorm.ops.norms import NORMS, NormKind
from hf_qknorm.ops.types import Norm, Rotary


def norm_arguments(norm: Norm) -> tuple[object, ...]:
    """Gain and bias, each with its strides from head to head and from column to column; blend, eps twice, p."""
    norm = Norm() if norm.kind == "none" else norm
    return *_by_head(norm.gain), *_by_head(norm.bias), norm.blend, *norm.eps_parts, norm.p


def norm_kind(norm: Norm) -> NormKind | None:
    """The kind that kernels are compiled for, None for no norm."""
    return None if norm.kind == "none" else NORMS[norm.kind]


def _by_head(values: Tensor | None) -> tuple[Tensor | None, int, int]:
    """A gain or bias and its strides, 0 where all heads or columns have the same."""
    if values is None:
        return None, 0, 0
    return values, values.stride(0) if values.ndim == 2 else 0, 0 if values.numel() == 1 else values.stride(-1)


def rotary_arguments(rotary: Rotary | None) -> tuple[object, ...] | None:
    """cos and sin, each with its strides, 0 from batch to batch where all have the same."""
    if rotary is None:
        return None
    cos, sin = ((x, 0 if len(x) == 1 else x.stride(0), *x.stride()[1:]) for x in (rotary.cos, rotary.sin))
    return *cos, *sin


def sum_to(partials: Tensor | None, like: Tensor | None) -> Tensor | None:
    """The gradient of a gain or bias, in its shape, from partial sums `[programs, H, D]`: one order, no atomics."""
    if partials is None or like is None:
        return None
    return partials.sum(0).sum_to_size(like.shape).to(like.dtype)
