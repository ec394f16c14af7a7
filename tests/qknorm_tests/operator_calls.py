"""Calls of the attention operators from loose arguments, named as those of `reference.attention`."""

from typing import Any

from torch import Tensor

from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible

NO_NORM = Norm()


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_norm: Norm = NO_NORM,
    k_norm: Norm = NO_NORM,
    rotary: Rotary | None = None,
    ranges: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    **options: Any,
) -> tuple[Heads, Visible, Options]:
    """The arguments of `library.attention` and `library.fused_attention`; the scale is 1/√D by default."""
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    return Heads(q, k, v, q_norm, k_norm, rotary), Visible(ranges, sinks, mask=mask), Options(scale, **options)
