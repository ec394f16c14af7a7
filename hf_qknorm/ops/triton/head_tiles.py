"""Tiles of heads on the device, BLOCK rows of one head: loading, storing, products.

The width of a tensor is a power of two. A tile is one with all columns, up to C.PADDED; or with C.REST two side by
side, the second with C.REST of the columns: 96 as 64 + 32 take 3/4 of the products that 128 do.

Heads are a tensor descriptor, or, if C.POINTERS, `arguments.HeadArguments`: GPUs before Hopper have no copy engine, and
descriptors there cost a 64-bit address for each load. Rows past the head's end and columns of padding are loaded as 0,
and not stored. `C` is `arguments.Constants`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def both_parts(X, X_REST, C: tl.constexpr):
    """Heads for `load_tile` and `store_tile`, from the arguments that `launch.head_arguments` makes."""
    if C.REST:
        X = (X, X_REST)
    return X


@triton.jit
def load_tile(X, batch, head, start, length, BLOCK: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr = False):
    """Rows `[BLOCK, P]` from `start` on of a head with `length` rows; FULL promises that none is past the end."""
    MAIN: tl.constexpr = C.PADDED - C.REST
    if C.REST:
        main = _load(X[0], batch, head, start, length, BLOCK, 0, MAIN, C, FULL)
        x = (main, _load(X[1], batch, head, start, length, BLOCK, MAIN, C.REST, C, FULL))
    else:
        x = _load(X, batch, head, start, length, BLOCK, 0, C.PADDED, C, FULL)
    return x


@triton.jit
def store_tile(X, x, batch, head, start, length, BLOCK: tl.constexpr, C: tl.constexpr):
    """Store the rows x `[BLOCK, P]` from `start` on, in the dtype of X."""
    MAIN: tl.constexpr = C.PADDED - C.REST
    if C.REST:
        _store(X[0], x[0], batch, head, start, length, BLOCK, 0, MAIN, C)
        _store(X[1], x[1], batch, head, start, length, BLOCK, MAIN, C.REST, C)
    else:
        _store(X, x, batch, head, start, length, BLOCK, 0, C.PADDED, C)


@triton.jit
def zero_tile(BLOCK: tl.constexpr, C: tl.constexpr):
    """A tile of zeros `[BLOCK, P]` in fp32."""
    MAIN: tl.constexpr = C.PADDED - C.REST
    x = tl.zeros([BLOCK, MAIN], tl.float32)
    if C.REST:
        x = (x, tl.zeros([BLOCK, C.REST], tl.float32))
    return x


@triton.jit
def scaled(x, factor, C: tl.constexpr):
    """The tile x `[BLOCK, P]` times a factor, or one for each row `[BLOCK, 1]`."""
    return (x[0] * factor, x[1] * factor) if C.REST else x * factor


@triton.jit
def products(x, y, C: tl.constexpr):
    """The products `[M, N]` of the rows of x `[M, P]` and y `[N, P]`."""
    if C.REST:
        xy = tl.dot(x[0], y[0].T, input_precision=C.PRECISION)
        xy = tl.dot(x[1], y[1].T, xy, input_precision=C.PRECISION)
    else:
        xy = tl.dot(x, y.T, input_precision=C.PRECISION)
    return xy


@triton.jit
def add_weighted(total, weights, x, C: tl.constexpr):
    """The sums `[M, P]` plus those of the rows of x `[N, P]` with `weights` `[M, N]`, rounded to the dtype of x."""
    if C.REST:
        weights = weights.to(x[0].dtype)
        main = tl.dot(weights, x[0], total[0], input_precision=C.PRECISION)
        total = (main, tl.dot(weights, x[1], total[1], input_precision=C.PRECISION))
    else:
        total = tl.dot(weights.to(x.dtype), x, total, input_precision=C.PRECISION)
    return total


@triton.jit
def _load(
    X, batch, head, start, length,
    BLOCK: tl.constexpr, FIRST: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The tensor `[BLOCK, COLUMNS]` of the columns from FIRST on."""
    if C.POINTERS:
        at = _addresses(X, batch, head, start, BLOCK, FIRST, COLUMNS)
        if FULL and FIRST + COLUMNS <= C.HEAD_DIM:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=_real(start, length, BLOCK, FIRST, COLUMNS, C.HEAD_DIM, FULL), other=0.0)
    else:
        x = X.load([batch, head, start, FIRST]).reshape(BLOCK, COLUMNS)
    return x


@triton.jit
def _store(
    X, x, batch, head, start, length,
    BLOCK: tl.constexpr, FIRST: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store the columns x `[BLOCK, COLUMNS]` from FIRST on."""
    if C.POINTERS:
        at = _addresses(X, batch, head, start, BLOCK, FIRST, COLUMNS)
        real = _real(start, length, BLOCK, FIRST, COLUMNS, C.HEAD_DIM, False)
        tl.store(at, x.to(X.data.dtype.element_ty), mask=real)
    else:
        X.store([batch, head, start, FIRST], x.to(X.dtype).reshape(1, 1, BLOCK, COLUMNS))


@triton.jit
def _addresses(X, batch, head, start, BLOCK: tl.constexpr, FIRST: tl.constexpr, COLUMNS: tl.constexpr):
    """The addresses `[BLOCK, COLUMNS]`: one of 64 bits for the tile, and offsets of 32 bits inside of it."""
    ALIGNED: tl.constexpr = 128 // X.data.dtype.element_ty.primitive_bitwidth  # `launch.dense` aligns to 16 bytes
    first = batch.to(tl.int64) * X.batch + head.to(tl.int64) * X.head + start.to(tl.int64) * X.row
    rows = tl.arange(0, BLOCK)[:, None] * tl.multiple_of(X.row, ALIGNED)
    columns = tl.arange(FIRST, FIRST + COLUMNS)[None, :]
    return X.data + tl.multiple_of(first, ALIGNED) + (rows + columns)


@triton.jit
def _real(
    start, length,
    BLOCK: tl.constexpr, FIRST: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Which of the rows and columns `[BLOCK or 1, COLUMNS or 1]` are the head's own."""
    columns = (tl.arange(FIRST, FIRST + COLUMNS) < HEAD_DIM)[None, :]
    if FULL:
        real = columns
    elif FIRST + COLUMNS <= HEAD_DIM:
        real = (tl.arange(0, BLOCK) < length - start)[:, None]
    else:
        real = (tl.arange(0, BLOCK) < length - start)[:, None] & columns
    return real
