"""How kernels are started: on their tensors' device, with the tiles that the tables name and the loop that is right."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = math.log2(math.e)
INTERPRETED: Final[bool] = triton.knobs.runtime.interpret

FREE = 60.0  # nats: weights of bounded logits, without their maximum taken off, stay far from fp32's and bf16's ends
FREE_CAP = 64.0  # the same for a cap; e⁶⁴ is 2⁹²
ODD7 = 0.75  # where the polynomial stands for tanh


class Tile(NamedTuple):
    """Queries and keys of a tile, and how many warps and pipeline stages work on it."""

    queries: int
    keys: int
    warps: int
    stages: int


# By the size of a number in bytes, and head_dim rounded up to a power of two. Chosen by what ptxas makes of them for
# sm_90: no spilled registers and shared memory for one program at least.
FORWARD: dict[tuple[int, int], Tile] = {
    (2, 16): Tile(128, 128, 8, 3),
    (2, 32): Tile(128, 128, 8, 3),
    (2, 64): Tile(128, 128, 8, 3),
    (2, 128): Tile(128, 128, 8, 2),
    (2, 256): Tile(128, 64, 8, 2),
    (4, 16): Tile(64, 32, 4, 2),
    (4, 32): Tile(64, 32, 4, 2),
    (4, 64): Tile(64, 32, 4, 2),
    (4, 128): Tile(32, 32, 4, 2),
    (4, 256): Tile(32, 32, 8, 1),
}
QUERY_GRADIENT: dict[tuple[int, int], Tile] = {
    (2, 16): Tile(128, 128, 8, 2),
    (2, 32): Tile(128, 128, 8, 2),
    (2, 64): Tile(128, 128, 8, 2),
    (2, 128): Tile(128, 64, 8, 2),
    (2, 256): Tile(128, 32, 8, 2),
    (4, 16): Tile(32, 32, 4, 2),
    (4, 32): Tile(32, 32, 4, 2),
    (4, 64): Tile(32, 32, 4, 2),
    (4, 128): Tile(32, 32, 8, 1),
    (4, 256): Tile(16, 16, 8, 1),
}
KEY_GRADIENT: dict[tuple[int, int], Tile] = {
    (2, 16): Tile(64, 128, 8, 2),
    (2, 32): Tile(64, 128, 8, 2),
    (2, 64): Tile(64, 128, 8, 2),
    (2, 128): Tile(64, 128, 8, 2),
    (2, 256): Tile(64, 64, 8, 2),
    (4, 16): Tile(32, 32, 4, 2),
    (4, 32): Tile(32, 32, 4, 2),
    (4, 64): Tile(32, 32, 4, 2),
    (4, 128): Tile(32, 32, 8, 1),
    (4, 256): Tile(16, 16, 8, 1),
}


def tile(table: dict[tuple[int, int], Tile], x: Tensor) -> Tile:
    """The table's tile for heads like those of x `[B, H, T, D]`."""
    return table[x.element_size(), padded(x.shape[-1])]


def padded(head_dim: int) -> int:
    """Columns of a tile: the power of two, 16 at least, that holds head_dim."""
    return max(16, 1 << (head_dim - 1).bit_length())


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    *arguments: Any,
    asserts: bool = False,
    **options: Any,
) -> None:
    """Start `kernel` on `device`, which need not be the current one; `options` are its constants, warps and stages.

    `asserts` keeps its assertions, and adds none of Triton's own about integers; the interpreter knows none.
    """
    if asserts and not INTERPRETED:
        options |= {"debug": True, "sanitize_overflow": False}
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **options, enable_fp_fusion=True)


def dense(x: Tensor) -> Tensor:
    """x `[B, H, T, D]` as the copy engine reads it, in rows aligned to 16 bytes; as it is wherever that will do."""
    aligned = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        aligned &= size == 1 or (stride > 0 and stride * x.element_size() % 16 == 0)
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows and all (padded) columns of x `[B, H, T, D]`, which is `dense`; zero outside of x."""
    step = 16 // x.element_size()
    strides = [stride if size > 1 else step for size, stride in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:-1], 1], [1, 1, rows, padded(x.shape[-1])])


class Loop(NamedTuple):
    """An inner loop, and which heads it is for: those whose bound on the scores is "within" or "beyond" the limit."""

    tanh: str
    online: bool
    when: str = "always"
    limit: float = 0.0


def loops(dtype: torch.dtype, softcap: float | None, bounded: bool, sinks: bool) -> list[Loop]:
    """The inner loops that share a call: each head is served by one, which the device chooses by the head's bound.

    Without a bound (nothing normed the heads) there is one loop. fp16 can't hold weights without their maximum taken
    off; a sink is a logit without a bound. The polynomial tanh is too coarse for fp32, tanh.approx for fp16 too.
    """
    free = dtype != torch.float16 and not sinks
    if softcap is None:
        if not (bounded and free):
            return [Loop("none", True)]
        limit = FREE * LOG2E
        return [Loop("none", False, "within", limit), Loop("none", True, "beyond", limit)]
    online = not (free and softcap <= FREE_CAP)
    # the interpreter knows no inline assembly
    tanh = "approx" if dtype == torch.bfloat16 and not INTERPRETED else "exact"
    if not bounded or dtype == torch.float32:
        return [Loop(tanh, online)]
    return [Loop("odd7", online, "within", ODD7), Loop(tanh, online, "beyond", ODD7)]


def gradient_loops(dtype: torch.dtype, softcap: float | None, bounded: bool, sinks: bool) -> list[Loop]:
    """The loops that backward needs: it has the log-sum-exp and asks for no maximum, but for the same tanh."""
    return [Loop("none", False)] if softcap is None else loops(dtype, softcap, bounded, sinks)


def units(scale: float, softcap: float | None) -> tuple[float, float, bool]:
    """`unit` and `cap` of the kernels, for ready heads, and whether they multiply by `unit`: only in front of a cap."""
    if softcap is None:  # one multiplication for both
        return 1.0, scale * LOG2E, False
    return scale / softcap, softcap * LOG2E, True


def reach(window: int | None, queries: int, keys: int) -> int:
    """A window as kernels count it, which add it to positions in 32 bits: 0 for none, no longer than hides nothing."""
    return min(window or 0, queries + keys)


def precision(dtype: torch.dtype) -> str:
    """How fp32 tiles are multiplied: exactly, unless PyTorch was told that tf32 will do."""
    allowed = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"
