"""Blocks that several programs share: each stores a result of its own, and a launch combines them in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_qknorm.ops.triton.arguments import (
    Constants,
    NormArguments,
    NormConstants,
    RotaryArguments,
    partial_sums,
    sum_to,
)
from hf_qknorm.ops.triton.attention_forward import LOWEST
from hf_qknorm.ops.triton.head_tiles import load_tile, store_tile
from hf_qknorm.ops.triton.launch import as_tiles, dense, launch, padded, uses_pointers
from hf_qknorm.ops.triton.schedule import Division
from hf_qknorm.ops.triton.undo_norm_rope import store_raw_gradient
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


@triton.jit
def _added(X, batch, head, start, length, parts, C: tl.constexpr):
    """The sum `[BLOCK_M, P]` of the rows of `parts` heads of X."""
    x = tl.zeros([C.BLOCK_M, C.PADDED], tl.float32)
    for part in tl.range(0, parts):
        x += load_tile(X, batch, head * parts + part, start, length, C.BLOCK_M, C)
    return x


@triton.jit(do_not_specialize=["heads", "length", "parts"])
def add_parts_kernel(
    DX_PARTS, X, DX, norm, dgain, dbias, rotary, heads, length, parts,
    NORM: tl.constexpr, C: tl.constexpr, DV_PARTS=None, DV=None,
):  # fmt: skip
    """The gradients of raw queries or keys, and of values if given, from sums `[B, H·parts, T, D]`."""
    blocks = tl.cdiv(length, C.BLOCK_M)
    number = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * C.BLOCK_M
    batch = number // heads
    head = number % heads
    if DV is not None:
        store_tile(DV, _added(DV_PARTS, batch, head, start, length, parts, C), batch, head, start, length, C.BLOCK_M, C)
    dx = _added(DX_PARTS, batch, head, start, length, parts, C)
    store_raw_gradient(dx, X, DX, norm, dgain, dbias, rotary, batch, head, start, length, C.BLOCK_M, NORM, C)


@triton.jit(do_not_specialize=["heads", "queries", "parts"])
def combine_parts_kernel(OUT_PARTS, OUT, part_normaliser, normaliser, heads, queries, parts, C: tl.constexpr):
    """Output and normaliser of `forward_kernel`, joined from its parts' `[B, H·parts, T, …]`."""
    blocks = tl.cdiv(queries, C.BLOCK_M)
    number = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * C.BLOCK_M
    batch = number // heads
    head = number % heads
    rows = start + tl.arange(0, C.BLOCK_M)
    real = rows < queries
    acc = tl.zeros([C.BLOCK_M, C.PADDED], tl.float32)
    total = tl.zeros([C.BLOCK_M], tl.float32)
    peak = total + LOWEST
    for part in tl.range(0, parts):
        at = part_normaliser + 2 * ((number * parts + part).to(tl.int64) * queries + rows)
        part_peak = tl.load(at, real, LOWEST)
        higher = tl.maximum(peak, part_peak)
        shrink = tl.exp2(peak - higher)
        weight = tl.load(at + 1, real, 0.0) * tl.exp2(part_peak - higher)
        out = load_tile(OUT_PARTS, batch, head * parts + part, start, queries, C.BLOCK_M, C)
        acc = acc * shrink[:, None] + out * weight[:, None]
        total = total * shrink + weight
        peak = higher
    at = normaliser + 2 * (number.to(tl.int64) * queries + rows)
    tl.store(at, peak, real)
    tl.store(at + 1, total, real)
    empty = total == 0  # false for NaN, which reaches the output
    out = acc * tl.where(empty, 0.0, 1.0 / total)[:, None]
    store_tile(OUT, out, batch, head, start, queries, C.BLOCK_M, C)


def raw_gradients(
    store: Callable[..., None],
    division: Division,
    block: int,
    x: Tensor,
    norm: Norm,
    rotary: Rotary | None,
    **dx: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Write the raw gradient DX `[B, H, T, D]` of x, and DV if given; returns the gradients of gain and bias.

    `store` launches the kernel, for blocks of `block` rows: it takes these, a `RawGradient`, and the tensors to write.
    """
    if division.parts == 1:
        raw = RawGradient.of(x, norm, rotary, dx["DX"], block, division.section)
        store(block, raw, **dx)
        return raw.gain_and_bias()
    b, h, t, d = x.shape
    sums = {name: x.new_empty(b, h * division.parts, t, d, dtype=torch.float32) for name in dx}
    store(block, RawGradient.of(x, Norm(), None, sums["DX"], block), **sums)
    raw = RawGradient.of(x, norm, rotary, dx["DX"], rows(d))
    tiles = dx | {f"{name}_PARTS": each for name, each in sums.items()}
    arguments: dict[str, Any] = {name: as_tiles(each, rows(d)) for name, each in tiles.items()}
    arguments |= {"heads": h, "length": t, "parts": division.parts, "C": _constants(x), "num_warps": 4}
    launch(add_parts_kernel, (raw.programs,), x.device, **arguments, **raw.arguments)
    return raw.gain_and_bias()


def combine(out_parts: Tensor, part_normaliser: Tensor, out: Tensor, normaliser: Tensor) -> None:
    """Store out `[B, H, T, D]` and normaliser `[B, H, T, 2]`, joined from the parts' `[B, H·parts, T, …]`."""
    b, heads, queries, head_dim = out.shape
    block = rows(head_dim)
    launch(
        combine_parts_kernel,
        (b * heads * -(-queries // block),),
        out.device,
        OUT_PARTS=as_tiles(out_parts, block),
        OUT=as_tiles(out, block),
        part_normaliser=part_normaliser,
        normaliser=normaliser,
        heads=heads,
        queries=queries,
        parts=out_parts.shape[1] // heads,
        C=_constants(out),
        num_warps=4,
    )


def rows(head_dim: int) -> int:
    """Rows of a program: two tiles fit the registers."""
    return max(16, 4096 // padded(head_dim))


def _constants(x: Tensor) -> Constants:
    head_dim = x.shape[-1]
    return Constants(rows(head_dim), rows(head_dim), padded(head_dim), head_dim, POINTERS=uses_pointers(x.device))
