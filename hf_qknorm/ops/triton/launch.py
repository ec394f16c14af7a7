"""Launching kernels: their architecture, tensor descriptors, and the variants of the inner loop that a call needs."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cache, cached_property, lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hf_qknorm.ops.triton.architectures import ARCHITECTURES, CAP_WITHOUT_MAXIMUM, Architecture, Tile, Tiles
from hf_qknorm.ops.triton.arguments import Constants, HeadArguments

LOG2E = math.log2(math.e)
INTERPRETED: Final[bool] = triton.knobs.runtime.interpret

BOUND_WITHOUT_MAXIMUM = 60.0  # logits in nats up to which the softmax needs no maximum: see ops/README.md
POLYNOMIAL_LIMIT = 0.6  # |score| up to which the polynomial replaces tanh


def capability(device: torch.device) -> tuple[int, int]:
    """That of a GPU; for the CPU, that which kernels are compiled for, and a Hopper's in the interpreter."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return (9, 0) if INTERPRETED else divmod(triton.runtime.driver.active.get_current_target().arch, 10)


@cache
def architecture(device: torch.device) -> Architecture:
    """The architecture of a device."""
    return ARCHITECTURES[capability(device)]


def tiles(x: Tensor) -> Tiles:
    """The tiles for heads like x `[B, H, T, D]`."""
    return architecture(x.device).tiles[x.element_size(), padded(x.shape[-1])]


@cache
def padded(head_dim: int) -> int:
    """Columns of a tile: the power of two, 16 at least, that holds head_dim."""
    return max(16, 1 << (head_dim - 1).bit_length())


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **options: Any) -> None:
    """Start `kernel` on `device`, which need not be the current one; `options`: arguments by name, warps and stages."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **options, enable_fp_fusion=True)


class _Hashed(Constants):
    """Constants with a hash that is computed once: each launch takes it, and that of a `constexpr` takes long."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)


@lru_cache(4096)
def constants(*fields: Any, **options: Any) -> Constants:
    """`Constants` as Triton 3.6 needs them: fields of a constant tuple are not constants by themselves there."""
    made = Constants(*fields, **options)
    return made if INTERPRETED else _Hashed(*map(triton.language.constexpr, made))


def dense(x: Tensor) -> Tensor:
    """x `[B, H, T, D]` in rows aligned to 16 bytes, as the copy engine (TMA) reads it: x itself, or a copy."""
    (batch, head, row, _), step = _strides(x), 16 // x.element_size()
    aligned = not (batch % step or head % step or row % step or x.data_ptr() % 16)
    if aligned and x.stride(3) == 1 and batch > 0 and head > 0 and row > 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def as_tiles(x: Tensor, rows: int) -> TensorDescriptor | HeadArguments:
    """x `[B, H, T, D]`, which is `dense`, as kernels on its device load and store tiles of `rows` rows of it."""
    return pointers(x) if by_pointers(x.device) else descriptor(x, rows)


def by_pointers(device: torch.device) -> bool:
    """Whether kernels on this device take heads as `pointers`, not as `descriptor`s."""
    return not architecture(device).descriptors


def pointers(x: Tensor) -> HeadArguments:
    """x `[B, H, T, D]`, which is `dense`, as kernels with C.POINTERS load and store tiles of it."""
    return HeadArguments(x, *_strides(x)[:3])


class _Descriptor(TensorDescriptor):
    """A descriptor without Triton's checks, which take longer than all else of a launch: heads are `dense`."""

    def __post_init__(self) -> None: ...


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows of x `[B, H, T, D]`, which is `dense`, with all columns; zero outside of x."""
    return _Descriptor(x, [*x.shape], _strides(x), [1, 1, rows, padded(x.shape[-1])])


def _strides(x: Tensor) -> list[int]:
    """Strides of x, which is `dense`: multiples of 16 bytes but for the last; 16 numbers for an axis of one.

    Of integers Triton specialises the multiples of 16, as most of the other strides are. No loop: it takes 5 µs.
    """
    (batches, heads, rows, _), (batch, head, row, _) = x.shape, x.stride()
    return [batch if batches > 1 else 16, head if heads > 1 else 16, row if rows > 1 else 16, 1]


class LoopVariant(NamedTuple):
    """An inner loop, and the heads that it serves: with bounds on the scores "within" or "beyond" the limit."""

    tanh: str
    online: bool
    when: str = "always"
    limit: float = 0.0


@lru_cache(4096)
def loop_constants(tile: Tile, head_dim: int, *variants: LoopVariant, **fields: Any) -> dict[str, Constants]:
    """`constants` of a kernel's first loop, `C`, and the one beyond its limit, if there is one; not to be changed."""
    made = (
        constants(tile.queries, tile.keys, padded(head_dim), head_dim, TANH=tanh, ONLINE=online, WHEN=when, **fields)
        for tanh, online, when, _ in variants
    )
    return dict(zip(("C", "BEYOND"), made, strict=False))


def forward_variants(dtype: torch.dtype, softcap: float | None, bounded: bool, sinks: bool) -> list[LoopVariant]:
    """The variants of the inner loop: the head's bound decides on the device which one serves it.

    Without a bound (heads without norm and RoPE) there is one. Weights without a maximum don't fit fp16; in fp32 their
    logits would be rounded at the size of the cap. A sink is a logit without a bound. The polynomial is too coarse for
    fp32, and tanh.approx for fp16 too.
    """
    may_skip_maximum = dtype == torch.bfloat16 and not sinks
    if softcap is None:
        if not (bounded and may_skip_maximum):
            return [LoopVariant("none", True)]
        limit = BOUND_WITHOUT_MAXIMUM * LOG2E
        return [LoopVariant("none", False, "within", limit), LoopVariant("none", True, "beyond", limit)]
    online = not (may_skip_maximum and softcap <= CAP_WITHOUT_MAXIMUM)
    # the interpreter has no inline assembly
    tanh = "approx" if dtype == torch.bfloat16 and not INTERPRETED else "exact"
    if not bounded or dtype == torch.float32:
        return [LoopVariant(tanh, online)]
    limit = POLYNOMIAL_LIMIT
    return [LoopVariant("polynomial", online, "within", limit), LoopVariant(tanh, online, "beyond", limit)]


def units(scale: float, softcap: float | None) -> tuple[float, float, bool]:
    """`unit` and `cap` for heads without norm and RoPE, and whether kernels multiply by `unit`: only with a cap."""
    if softcap is None:  # one multiplication for both
        return 1.0, scale * LOG2E, False
    return scale / softcap, softcap * LOG2E, True


def dropout_numbers(rate: float) -> tuple[int, float]:
    """`drop_below` and `rescale` of `ScoreArguments`, both for the rate rounded to a multiple of 2⁻¹⁶ below 1."""
    dropped = min(round(rate * 2**16), 2**16 - 1)
    return (dropped << 16) - 2**31, 2**16 / (2**16 - dropped)


def reach(window: int | None, queries: int, keys: int) -> int:
    """The window that kernels get, 0 for none: no longer than all positions, since they add it to 32-bit positions."""
    return min(window or 0, queries + keys)


def precision(dtype: torch.dtype) -> str:
    """The precision of products of fp32 tiles: "ieee", or "tf32" where PyTorch's setting allows it."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
