"""The end of the backward kernels on the device: undoing RoPE and norm of a block of rows, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_qknorm.ops.triton.head_tiles import load_tile, store_tile
from hf_qknorm.ops.triton.norm_math import backward, partners, statistics


@triton.jit
def unrotated(grad, rotary, batch, start, length, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """The gradient `[M, P]` of heads in front of RoPE, for that behind it: heads are rotated whole, in halves."""
    columns = tl.arange(0, PADDED)
    row = tl.arange(0, BLOCK)[:, None]
    other, angle, sign = partners(columns, PADDED, False)
    cos = rotary.cos + batch.to(tl.int64) * rotary.cos_batch + start.to(tl.int64) * rotary.cos_row
    sin = rotary.sin + batch.to(tl.int64) * rotary.sin_batch + start.to(tl.int64) * rotary.sin_row
    swapped = tl.gather(grad, other[None, :] + tl.zeros([BLOCK, PADDED], tl.int32), 1)
    real = row + start < length
    c = tl.load(cos + row * rotary.cos_row + angle[None, :] * rotary.cos_pair, mask=real, other=1.0).to(tl.float32)
    s = tl.load(sin + row * rotary.sin_row + angle[None, :] * rotary.sin_pair, mask=real, other=0.0).to(tl.float32)
    return grad * c - swapped * (sign[None, :] * s)


@triton.jit
def store_raw_gradient(
    grad, X, DX, norm, dgain, dbias, rotary, batch, head, start, length,
    BLOCK: tl.constexpr, NORM: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the raw rows X, for the gradient `[M, P]` of what norm and RoPE made of them.

    dgain and dbias `[programs, P]` get the program's sums. Heads without padding and rotated whole, in halves: with
    others this would not fit into the registers.
    """
    if rotary is not None:
        grad = unrotated(grad, rotary, batch, start, length, BLOCK, C.PADDED)
    if NORM is not None:
        columns = tl.arange(0, C.PADDED)
        x = load_tile(X, batch, head, start, length, BLOCK, C).to(tl.float32)
        real = columns >= 0
        shift, factor, unit, pull = statistics(x, real, norm, C.PADDED, NORM)
        dn = grad
        if norm.gain is not None:
            gain = tl.load(norm.gain + head * norm.gain_head + columns * norm.gain_column)
            dn = grad * gain.to(tl.float32)[None, :]
        dx, n = backward(dn, x, real, shift, factor, unit, pull, norm.p, C.PADDED, NORM)
        own = tl.program_id(0).to(tl.int64) * C.PADDED + columns
        if norm.gain is not None:
            tl.store(dgain + own, tl.sum(grad * n, 0))
        if dbias is not None:
            rows = (tl.arange(0, BLOCK) + start < length)[:, None]  # past the end are weights, but no rows
            tl.store(dbias + own, tl.sum(tl.where(rows, grad, 0.0), 0))
        grad = dx
    store_tile(DX, grad, batch, head, start, length, BLOCK, C)
