"""The arguments of every attention operator, a `Call`: heads with norms and rotation, visible keys, options."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)  # of heads, that kernels take
MOST_COLUMNS: Final = 256


class Norm(NamedTuple):
    """The arguments of `reference.head_norm`; the kind "none" is the identity.

    `gain` and `bias` are `[D]`, `[H, D]` or `[1]`. `knee` `[3]` is a `norms.Shape`, None for the plain one: kernels
    read it from memory, so that one graph serves every value.
    """

    kind: str = "none"
    gain: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6
    p: float = 2.0
    knee: Tensor | None = None


class Rotary(NamedTuple):
    """The rotation of the first R columns of each head: cos and sin `[B or 1, T, R/2]`, one angle per pair.

    A pair is (i, i + R/2), or (2i, 2i + 1) if `interleaved`. Any strides are allowed.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


NO_ANGLES: Final = (None, None, False)  # in the place of a `Rotary`


class Heads(NamedTuple):
    """Queries `[B, H, T, D]`, keys and values `[B, Hk, S, D]`, and the norms and rotation still to be applied."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_norm: Norm = Norm()
    k_norm: Norm = Norm()
    rotary: Rotary | None = None

    @property
    def raw(self) -> bool:
        """Whether a norm or a rotation is still to be applied."""
        return self.rotary is not None or self.q_norm.kind != "none" or self.k_norm.kind != "none"


class Visible(NamedTuple):
    """The keys and weights that each query sees, apart from causality and window; as in `reference.attention`.

    `ranges` `[B or 1, T, 2]` (int32), `sinks` `[H]`, the `seed` `[1]` of dropout, `mask` broadcastable to
    `[B, H, T, S]`. The kernels take no mask.
    """

    ranges: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None
    mask: Tensor | None = None

    def for_kernels(self, batch: int) -> Visible:
        """The same with ranges for every row of the batch, and without gaps between the numbers."""
        ranges, sinks, seed, _ = self
        ranges = None if ranges is None else ranges.expand(batch, -1, -1).contiguous()
        return Visible(ranges, None if sinks is None else sinks.contiguous(), seed)


class Options(NamedTuple):
    """The numbers and switches between logits and weights; as in `reference.attention`, and the dropout rate."""

    scale: float
    softcap: float | None = None
    causal: bool = False
    window: int | None = None
    dropout: float = 0.0


class Call(NamedTuple):
    """One call of an attention operator: its heads, the keys that they see, and its options."""

    heads: Heads
    visible: Visible
    options: Options


def laid_out(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Empty heads like x `[B, H, T, D]`, laid out as `[B, T, H, D]`."""
    b, h, t, d = x.shape
    return x.new_empty_strided((b, h, t, d), (t * h * d, d, h * d, 1), dtype=dtype)
