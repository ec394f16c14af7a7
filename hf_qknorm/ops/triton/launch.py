"""Launching kernels: their architecture, tensor descriptors, and the variants of the inner loop that a call needs."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hf_qknorm.ops.triton.architectures import (
    ARCHITECTURES,
    CAP_WITHOUT_MAXIMUM,
    HOPPER,
    Architecture,
    Tile,
    Tiles,
)
from hf_qknorm.ops.triton.arguments import Constants, HeadArguments

LOG2E = math.log2(math.e)
INTERPRETED: Final[bool] = triton.knobs.runtime.interpret

BOUND_WITHOUT_MAXIMUM = 60.0  # logits in nats up to which the softmax needs no maximum: see ops/README.md
POLYNOMIAL_LIMIT = 0.6  # |score| up to which the polynomial replaces tanh


def architecture(device: torch.device) -> Architecture:
    """The architecture of a GPU; for the CPU, the one that kernels are compiled for, and Hopper in the interpreter."""
    if device.type == "cuda":
        return _of_gpu(device)
    return HOPPER if INTERPRETED else ARCHITECTURES[divmod(triton.runtime.driver.active.get_current_target().arch, 10)]


@cache
def _of_gpu(device: torch.device) -> Architecture:
    return ARCHITECTURES[torch.cuda.get_device_capability(device)]


def uses_pointers(device: torch.device) -> bool:
    """Whether kernels there get heads as pointers, not as tensor descriptors."""
    return not architecture(device).descriptors


def tiles(x: Tensor, dropout: bool = False) -> Tiles:
    """The tiles for heads like x `[B, H, T, D]`, with or without dropout."""
    chosen, key = architecture(x.device), (x.element_size(), padded(x.shape[-1]))
    found = chosen.tiles[key]
    if split(x.shape[-1]) is not None:
        found = found._replace(**chosen.split.get(key, {}))
    return found._replace(**chosen.dropout.get(key, {})) if dropout else found


def padded(head_dim: int) -> int:
    """Columns of a tile: the power of two, 16 at least, that holds head_dim."""
    return max(16, 1 << (head_dim - 1).bit_length())


def split(head_dim: int) -> tuple[int, int] | None:
    """Columns of two tiles side by side, both powers of two, where one tile would have more columns; else None.

    None for heads of up to 64 columns too: their matrix products take little of the time.
    """
    main = padded(head_dim) // 2
    rest = padded(head_dim - main)
    return (main, rest) if main >= 64 and rest < main else None


def columns(head_dim: int, tile: Tile) -> tuple[int, int]:
    """The columns of a kernel's tile, and of its second part: 0 if it has one part."""
    parts = split(head_dim) if tile.split else None
    return (padded(head_dim), 0) if parts is None else (sum(parts), parts[1])


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, asserts: bool = False, **options: Any
) -> None:
    """Start `kernel` on `device`, which need not be the current one; `options` are arguments by name, warps and stages.

    `asserts` keeps its assertions, without Triton's own about integers; the interpreter has none.
    """
    if asserts and not INTERPRETED:
        options |= {"debug": True, "sanitize_overflow": False}
    for name in ("C", "BEYOND"):
        if name in options and not INTERPRETED:
            options[name] = _with_constant_fields(options[name])
    with on(device):
        kernel[grid](*arguments, **options, enable_fp_fusion=True)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which `device` is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _with_constant_fields(constants: Constants) -> Constants:
    """The constants as Triton 3.6 needs them: fields of a constant tuple are not constants by themselves there."""
    return Constants(*map(triton.language.constexpr, constants))


def dense(x: Tensor) -> Tensor:
    """x `[B, H, T, D]` in rows aligned to 16 bytes, as the copy engine (TMA) reads it: x itself, or a copy."""
    step, (*outer, last) = 16 // x.element_size(), x.stride()
    rows = zip(x.shape, outer, strict=False)
    unaligned = [stride for size, stride in rows if size > 1 and (stride <= 0 or stride % step)]
    aligned = last == 1 and x.data_ptr() % 16 == 0 and not unaligned
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def as_tiles(x: Tensor, rows: int) -> TensorDescriptor | HeadArguments:
    """x `[B, H, T, D]`, which is `dense`, as kernels on its device load and store tiles of `rows` rows of it."""
    return pointers(x) if uses_pointers(x.device) else descriptor(x, rows, padded(x.shape[-1]))


def head_arguments(tile: Tile, rows: int, **heads: Tensor) -> dict[str, Any]:
    """Heads X `[B, H, T, D]`, which are `dense`, as arguments X and X_REST of a kernel with this tile.

    The second is None for heads of one part.
    """
    found: dict[str, Any] = {}
    for name, x in heads.items():
        total, rest = columns(x.shape[-1], tile)
        for part, width in ((name, total - rest), (f"{name}_REST", rest)):
            found[part] = None if width == 0 else pointers(x) if uses_pointers(x.device) else descriptor(x, rows, width)
    return found


def pointers(x: Tensor) -> HeadArguments:
    """x `[B, H, T, D]`, which is `dense`, as kernels with C.POINTERS load and store tiles of it."""
    return HeadArguments(x, *_strides(x)[:3])


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles of `rows` rows and `columns` columns of x `[B, H, T, D]`, which is `dense`; zero outside of x."""
    return TensorDescriptor(x, list(x.shape), _strides(x), [1, 1, rows, columns])


def _strides(x: Tensor) -> list[int]:
    """Strides of x, which is `dense`: multiples of 16 bytes but for the last; 16 numbers for an axis of one.

    Of integers Triton specialises the multiples of 16, as most of the other strides are.
    """
    *outer, _ = (stride if size > 1 else 16 for size, stride in zip(x.shape, x.stride(), strict=True))
    return [*outer, 1]


class LoopVariant(NamedTuple):
    """An inner loop, and the heads that it serves: with bounds on the scores "within" or "beyond" the limit."""

    tanh: str
    online: bool
    when: str = "always"
    limit: float = 0.0


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


def backward_variants(dtype: torch.dtype, softcap: float | None, bounded: bool, sinks: bool) -> list[LoopVariant]:
    """The variants for gradients: with forward's tanh; the log-sum-exp replaces the maximum."""
    if softcap is None:
        return [LoopVariant("none", False)]
    return [variant._replace(online=False) for variant in forward_variants(dtype, softcap, bounded, sinks)]


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
    allowed = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"
