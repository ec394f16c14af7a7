"""The rotation that kernels apply, from a model's position embeddings."""

from __future__ import annotations

from torch import Tensor

from hf_qknorm.ops.types import Rotary


def kernel_rotary(positions: tuple[Tensor, Tensor] | None, rope: str | None) -> Rotary | None:
    """The kernels' rotation from a model's cos and sin: `[B, T, R]` with each angle twice, or `[B, T, R/2]`.

    `rope` is the family's field. "halves": columns i and i + R/2 turn together. "pairs": columns 2i and 2i + 1 do, and
    the angles are ordered likewise. "pairs_by_halves": as pairs, with angles in the order of halves. "once": as halves,
    with each angle once.
    """
    if positions is None:
        return None
    cos, sin = positions
    width = cos.shape[-1]
    if rope != "once":
        cos, sin = (x[..., ::2] if rope == "pairs" else x[..., : width // 2] for x in (cos, sin))
    return Rotary(cos, sin, rope in ("pairs", "pairs_by_halves"))
