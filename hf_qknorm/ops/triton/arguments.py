"""Arguments of kernels as named tuples, which kernels read by field, and the sums of what their programs stored.

The tuples are flat: of nested ones Triton 3.6 loses the constants after a branch or a loop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_qknorm.norms import NORMS
from hf_qknorm.ops.types import Norm, Rotary


class Constants(NamedTuple):
    """What an attention kernel is compiled for; `C` in kernels."""

    BLOCK_M: int  # queries of a tile
    BLOCK_N: int  # keys of a tile
    PADDED: int  # columns of a tile, a power of two
    HEAD_DIM: int  # columns of a head, without padding
    POINTERS: bool = False  # heads are pointers with strides, not tensor descriptors, see `head_tiles`
    CAUSAL: bool = False
    WINDOW: bool = False
    RANGES: bool = False
    TANH: str = "none"  # how tanh is computed, see `score_math.tanh_and_slope`; "none" without a cap
    ONLINE: bool = False  # with a running maximum
    WHEN: str = "always"  # which heads the loop serves, see `score_math.serves`
    SCALED: bool = False  # a score is q·k·unit, else q·k
    SINKS: bool = False
    DROPOUT: bool = False
    STATISTICS: bool = False
    OMIT: str = "none"  # "keys" or "values": a gradient that `key_gradient_kernel` leaves to another launch
    ONE_LOOP: bool = False  # `key_gradient_kernel` masks all tiles, not only where a key is hidden
    UNHOISTED: bool = False  # loops of gradients compute for each tile what is the same for all of them
    EXACT: bool = False  # fp32: weights from peak and total, not from the log-sum-exp
    PRECISION: str = "ieee"  # of products of fp32 tiles


class Sizes(NamedTuple):
    """Numbers of heads, of queries and keys a head; the window, 0 without one; the heads of a section, see `schedule`.

    Kernels take each as an argument of its own, not specialised: of a tuple's fields Triton specialises all.
    """

    heads: int
    heads_kv: int
    queries: int
    keys: int
    window: int
    section: int = 1


class ScoreArguments(NamedTuple):
    """Factors: a score is q·k (times `unit` if SCALED), `cap` makes a logit of it. The limit of WHEN.

    Dropout drops weights whose random number, the upper half of a signed integer of 32 bits, is below `drop_below`, and
    multiplies the others by `rescale`; see `launch.dropout_numbers`.
    """

    unit: float
    cap: float
    limit: float = 0.0
    drop_below: int = -(2**31)
    rescale: float = 1.0


class NormArguments(NamedTuple):
    """Gain and bias, each with its strides between heads and columns; the scheme's eps, p, and the knee `[3]`."""

    gain: Tensor | None = None
    gain_head: int = 0
    gain_column: int = 0
    bias: Tensor | None = None
    bias_head: int = 0
    bias_column: int = 0
    eps: float = 0.0
    p: float = 2.0
    knee: Tensor | None = None

    @classmethod
    def of(cls, norm: Norm) -> NormArguments:
        norm = Norm() if norm.kind == "none" else norm
        return cls(*_by_head(norm.gain), *_by_head(norm.bias), norm.eps, norm.p, norm.knee)


class NormConstants(NamedTuple):
    """The compile-time constants of a norm's arithmetic, fields of `norms.NormKind`; `NORM` in kernels."""

    centred: bool
    summed: bool
    any_order: bool

    @classmethod
    def of(cls, norm: Norm) -> NormConstants | None:
        """The constants of a norm, None for no norm."""
        if norm.kind == "none":
            return None
        kind = NORMS[norm.kind]
        return cls(kind.centred, kind.summed, kind.any_order)

    def __str__(self) -> str:
        """The properties that it has, for tables of kernels."""
        return "+".join(name for name, value in self._asdict().items() if value) or "rms"


def _by_head(values: Tensor | None) -> tuple[Tensor | None, int, int]:
    """A gain or bias and its strides, 0 where all heads or columns have the same."""
    if values is None:
        return None, 0, 0
    return values, values.stride(0) if values.ndim == 2 else 0, 0 if values.numel() == 1 else values.stride(-1)


class RotaryArguments(NamedTuple):
    """cos and sin, each with its strides, 0 from batch to batch where all have the same."""

    cos: Tensor
    cos_batch: int
    cos_row: int
    cos_pair: int
    sin: Tensor
    sin_batch: int
    sin_row: int
    sin_pair: int

    @classmethod
    def of(cls, rotary: Rotary | None) -> RotaryArguments | None:
        if rotary is None:
            return None
        cos, sin, _ = rotary
        (*cos_strides,), (*sin_strides,) = cos.stride(), sin.stride()
        if cos.shape[0] == 1:
            cos_strides[0] = sin_strides[0] = 0
        return cls._make((cos, *cos_strides, sin, *sin_strides))


class HeadArguments(NamedTuple):
    """Heads `[B, H, T, D]` in dense rows (a copy of heads whose rows have gaps), and their other strides."""

    data: Tensor
    batch: int
    head: int
    row: int

    @classmethod
    def of(cls, x: Tensor | None) -> HeadArguments | None:
        if x is None:
            return None
        *strides, step = x.stride()
        return cls(x, *strides) if step == 1 else cls.of(x.contiguous())


def partial_sums(norm: Norm, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Buffers for partial sums of the gradients of gain and bias, None for an absent one."""
    values = (norm.gain, norm.bias) if norm.kind != "none" else (None, None)
    gain, bias = (None if value is None else torch.empty(shape, dtype=torch.float32, device=device) for value in values)
    return gain, bias


def sum_to(partials: Tensor | None, like: Tensor | None) -> Tensor | None:
    """The gradient of a gain or bias, in its shape, from partial sums `[…, H, D]`: one order, no atomics."""
    if partials is None or like is None:
        return None
    axes = partials.ndim if like.numel() == 1 else partials.ndim - like.ndim
    return partials.sum([*range(axes)]).view(like.shape).to(like.dtype)


def ranges_of_queries(ranges: Tensor, keys: int) -> Tensor:
    """The range of queries that see each key, `[B, S, 2]`, for non-decreasing ranges of keys `[B, T, 2]`."""
    places = torch.arange(keys, device=ranges.device, dtype=ranges.dtype).expand(ranges.shape[0], -1).contiguous()
    start, stop = (x.contiguous() for x in ranges.unbind(-1))
    first, last = (torch.searchsorted(x, places, right=True, out_int32=True) for x in (stop, start))
    return torch.stack([first, last], -1)
