"""The gradient of raw heads on the host: a kernel undoes their norm and rotation before it stores it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from hf_qknorm.ops.triton.arguments import NormArguments, NormConstants, RotaryArguments, partial_sums, sum_to
from hf_qknorm.ops.triton.launch import as_tiles, dense, padded
from hf_qknorm.ops.types import Norm, Rotary


class RawGradient(NamedTuple):
    """Arguments of `undo_norm_rope.store_raw_gradient`, all but DX, and the number of programs that call it."""

    arguments: dict[str, Any]
    programs: int
    shape: tuple[int, ...]
    norm: Norm

    @classmethod
    def of(cls, x: Tensor, norm: Norm, rotary: Rotary | None, dx: Tensor, rows: int, section: int = 1) -> RawGradient:
        """For dx `[B, H, T, D]`, the gradient of the raw heads x, in blocks of `rows`, ordered by `section`."""
        (b, heads, length, d), kind = dx.shape, NormConstants.of(norm)
        blocks = -(-length // rows)
        dgain, dbias = partial_sums(norm, (b * heads // section, blocks, section, padded(d)), x.device)
        arguments = {
            "X": None if kind is None else as_tiles(dense(x), rows),
            "norm": NormArguments.of(norm),
            "dgain": dgain,
            "dbias": dbias,
            "rotary": RotaryArguments.of(rotary),
            "NORM": kind,
        }
        return cls(arguments, b * heads * blocks, (b, heads, d), norm)

    def gain_and_bias(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the norm's gain and bias, None for absent ones, after the kernel."""
        gain, bias = (self._summed(self.arguments[name]) for name in ("dgain", "dbias"))
        return sum_to(gain, self.norm.gain), sum_to(bias, self.norm.bias)

    def _summed(self, sums: Tensor | None) -> Tensor | None:
        """The sums `[sections, blocks, section, D]` of a kernel's programs, added up by head `[B, H, D]`."""
        b, heads, d = self.shape
        return None if sums is None else sums.sum(1).view(b, heads, d)
