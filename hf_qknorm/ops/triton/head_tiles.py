"""Tiles of heads on the device, BLOCK rows of one head with C.PADDED columns: loading, storing, products.

Heads are a tensor descriptor, or, if C.POINTERS, `arguments.HeadArguments`: GPUs before Hopper have no copy engine, and
descriptors there cost a 64-bit address for each load. Rows past the head's end and columns of padding are loaded as 0,
and not stored. `C` is `arguments.Constants`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(X, batch, head, start, length, BLOCK: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr = False):
    """Rows `[BLOCK, P]` from `start` on of a head with `length` rows; FULL promises that none is past the end."""
    if C.POINTERS:
        at = _addresses(X, batch, head, start, BLOCK, C.PADDED)
        if FULL and C.PADDED == C.HEAD_DIM:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=_real(start, length, BLOCK, C, FULL), other=0.0)
    else:
        x = X.load([batch, head, start, 0]).reshape(BLOCK, C.PADDED)
    return x


@triton.jit
def store_tile(X, x, batch, head, start, length, BLOCK: tl.constexpr, C: tl.constexpr):
    """Store the rows x `[BLOCK, P]` from `start` on, in the dtype of X."""
    if C.POINTERS:
        at = _addresses(X, batch, head, start, BLOCK, C.PADDED)
        tl.store(at, x.to(X.data.dtype.element_ty), mask=_real(start, length, BLOCK, C, False))
    else:
        X.store([batch, head, start, 0], x.to(X.dtype).reshape(1, 1, BLOCK, C.PADDED))


@triton.jit
def products(x, y, C: tl.constexpr):
    """The products `[M, N]` of the rows of x `[M, P]` and y `[N, P]`."""
    return tl.dot(x, y.T, input_precision=C.PRECISION)


@triton.jit
def add_weighted(total, weights, x, C: tl.constexpr):
    """The sums `[M, P]` plus those of the rows of x `[N, P]` with `weights` `[M, N]`, rounded to the dtype of x."""
    return tl.dot(weights.to(x.dtype), x, total, input_precision=C.PRECISION)


@triton.jit
def _addresses(X, batch, head, start, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """The addresses `[BLOCK, P]`: one of 64 bits for the tile, and offsets of 32 bits inside of it."""
    ALIGNED: tl.constexpr = 128 // X.data.dtype.element_ty.primitive_bitwidth  # `launch.dense` aligns to 16 bytes
    first = batch.to(tl.int64) * X.batch + head.to(tl.int64) * X.head + start.to(tl.int64) * X.row
    rows = tl.arange(0, BLOCK)[:, None] * tl.multiple_of(X.row, ALIGNED)
    return X.data + tl.multiple_of(first, ALIGNED) + (rows + tl.arange(0, PADDED)[None, :])


@triton.jit
def _real(start, length, BLOCK: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr):
    """Which of the rows and columns `[BLOCK or 1, P or 1]` are the head's own."""
    columns = (tl.arange(0, C.PADDED) < C.HEAD_DIM)[None, :]
    if FULL:
        real = columns
    elif C.PADDED == C.HEAD_DIM:
        real = (tl.arange(0, BLOCK) < length - start)[:, None]
    else:
        real = (tl.arange(0, BLOCK) < length - start)[:, None] & columns
    return real
