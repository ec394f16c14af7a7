"""Norm and RoPE of queries and keys, on the device: on the way into attention, and the way back.

Each program has a block of rows of one head. Heads come first in the grid: cos and sin are read once from memory. The
other column of a rotated pair is loaded again (it is in L1 by then) and normed anew, which needs no exchange.

Arguments come in tuples, which must be flat: of nested ones Triton 3.6 loses the constants after a branch or a loop.
    heads   source, its strides (batch, head, row), result, its strides; rows are dense
    norm    gain, its strides (head, column), bias, its strides, blend, stored_eps, eps, p
    rotary  cos, its strides (batch, row, pair), sin, its strides
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_qknorm.ops.triton import norm_math


@triton.jit
def _entries(strides, batch, head, rows, columns):
    """Where a tile's entries are, in 64 bits: a batch of long texts has more of them than 32 count."""
    start = batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    return start + rows.to(tl.int64)[:, None] * strides[2] + columns[None, :]


@triton.jit
def _load(x, at, mask):
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _per_column(values, head_stride, column_stride, head, columns, HEAD_DIM: tl.constexpr):
    """A gain or a bias, `[1, P]`."""
    return _load(values, head * head_stride + columns * column_stride, columns < HEAD_DIM)[None, :]


@triton.jit
def _normed(x, shift, scale, norm, head, columns, HEAD_DIM: tl.constexpr):
    """What the norm makes of the entries x `[M, P]` of these columns."""
    gain, gain_head, gain_column, bias, bias_head, bias_column, blend, _, _, _ = norm
    y = (x - shift[:, None]) * scale[:, None]
    if gain is not None:
        y = y * _per_column(gain, gain_head, gain_column, head, columns, HEAD_DIM)
    if bias is not None:
        y = y + _per_column(bias, bias_head, bias_column, head, columns, HEAD_DIM)
    if blend is not None:
        y = x + tl.load(blend).to(tl.float32) * (y - x)
    return y


@triton.jit
def _rotation(rotary, batch, rows, angle, mask):
    """cos and sin of each entry, 0 where masked."""
    cos, cos_batch, cos_row, cos_pair, sin, sin_batch, sin_row, sin_pair = rotary
    c = _load(cos, _entries((cos_batch, 0, cos_row), batch, batch, rows, angle * cos_pair), mask)
    s = _load(sin, _entries((sin_batch, 0, sin_row), batch, batch, rows, angle * sin_pair), mask)
    return c, s


@triton.jit
def _prepare(
    heads, norm, rotary, positions, room, bound, group, factor, batch, head, block, length,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and multiply one tile; store it where `positions` say, and raise the group's bound to its rows.

    Positions outside of `room` are written nowhere; on a GPU they end the program with an assertion.
    """
    source, source_batch, source_head, source_row, result, result_batch, result_head, result_row = heads
    strides, result_strides = (source_batch, source_head, source_row), (result_batch, result_head, result_row)
    columns = tl.arange(0, PADDED)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    real = columns < HEAD_DIM
    live = (rows < length)[:, None] & real[None, :]
    x = _load(source, _entries(strides, batch, head, rows, columns), live)
    shift, scale = norm_math.statistics(x, real, norm[7], norm[8], norm[9], HEAD_DIM, NORM)
    y = _normed(x, shift, scale, norm, head, columns, HEAD_DIM)
    if ROTARY > 0:
        other, angle, sign = norm_math.partners(columns, ROTARY, INTERLEAVED)
        turned = live & (columns < ROTARY)[None, :]
        z = _load(source, _entries(strides, batch, head, rows, other), turned)
        z = _normed(z, shift, scale, norm, head, other, HEAD_DIM)
        c, s = _rotation(rotary, batch, rows, angle, turned)
        y = tl.where(turned, y * c + z * (s * sign[None, :]), y)
    y = (y * factor).to(result.dtype.element_ty)
    if bound is not None:
        rounded = tl.where(live, y.to(tl.float32), 0.0)
        longest = tl.sqrt_rn(tl.max(tl.sum(rounded * rounded, 1), 0))
        tl.atomic_max(bound + group, longest.to(tl.int32, bitcast=True), sem="relaxed")  # ≥ 0: ordered as integers are
    if positions is not None:
        rows = tl.load(positions + rows, mask=rows < length, other=0)
        inside = (rows >= 0) & (rows < room)
        tl.device_assert(inside, "a position is outside of the static cache: it is full, or too short")
        live = live & inside[:, None]
    tl.store(result + _entries(result_strides, batch, head, rows, columns), y, mask=live)


@triton.jit
def _place(count, length, ROWS: tl.constexpr):
    """Batch, head and block of rows of this program."""
    number = tl.program_id(0)
    blocks = tl.cdiv(length, ROWS)
    return number // count // blocks, number % count, number // count % blocks


@triton.jit
def prologue_kernel(
    q, k, v, q_norm, k_norm, rotary, positions, room, bound, factor, count, count_kv, total, length,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Heads q, k and, given positions, v, which like k goes there, but as it is."""
    batch, head, block = _place(total, length, BLOCK)
    if head < count:
        group = (batch * count_kv + head * count_kv // count) * 2
        _prepare(
            q, q_norm, rotary, None, 0, bound, group, factor, batch, head, block, length,
            BLOCK, PADDED, HEAD_DIM, Q_NORM, ROTARY, INTERLEAVED,
        )  # fmt: skip
    elif head < count + count_kv:
        if k is not None:
            group = (batch * count_kv + head - count) * 2 + 1
            _prepare(
                k, k_norm, rotary, positions, room, bound, group, 1.0, batch, head - count, block, length,
                BLOCK, PADDED, HEAD_DIM, K_NORM, ROTARY, INTERLEAVED,
            )  # fmt: skip
    elif positions is not None:
        _prepare(
            v, (None, 0, 0, None, 0, 0, None, None, 0.0, 2.0), None, positions, room, None, 0, 1.0,
            batch, head - count - count_kv, block, length,
            BLOCK, PADDED, HEAD_DIM, None, 0, False,
        )  # fmt: skip


@triton.jit
def _pull_back(
    heads, norm, rotary, factor, batch, head, chunk, length, slot,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """From the gradient of the results to that of the heads, tile by tile; sums for gain and bias go to `slot`.

    `heads` are here the given gradient, the raw heads, the wanted gradient, each with its strides, and the sums.
    """
    grad, grad_batch, grad_head, grad_row, source, source_batch, source_head, source_row = heads[:8]
    result, result_batch, result_head, result_row, dgain, dbias = heads[8:]
    gain, gain_head, gain_column, _, _, _, blend, stored_eps, eps, p = norm
    columns = tl.arange(0, PADDED)
    real = columns < HEAD_DIM
    gains = tl.zeros([BLOCK, PADDED], tl.float32)
    biases = tl.zeros([BLOCK, PADDED], tl.float32)
    if blend is not None:
        share = tl.load(blend).to(tl.float32)
    if gain is not None:
        g = _per_column(gain, gain_head, gain_column, head, columns, HEAD_DIM)
    first = chunk * (BLOCK * STEPS)
    for start in tl.range(first, tl.minimum(first + BLOCK * STEPS, length), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        live = (rows < length)[:, None] & real[None, :]
        dy = _load(grad, _entries((grad_batch, grad_head, grad_row), batch, head, rows, columns), live)
        if ROTARY > 0:
            other, angle, sign = norm_math.partners(columns, ROTARY, INTERLEAVED)
            turned = live & (columns < ROTARY)[None, :]
            dz = _load(grad, _entries((grad_batch, grad_head, grad_row), batch, head, rows, other), turned)
            c, s = _rotation(rotary, batch, rows, angle, turned)
            dy = tl.where(turned, dy * c - dz * (s * sign[None, :]), dy)
        dy = dy * factor
        direct = dy * 0.0
        if blend is not None:
            direct = dy * (1.0 - share)
            dy = dy * share
        x = _load(source, _entries((source_batch, source_head, source_row), batch, head, rows, columns), live)
        shift, scale = norm_math.statistics(x, real, stored_eps, eps, p, HEAD_DIM, NORM)
        dn = dy
        if gain is not None:
            dn = dy * g
        dx, n = norm_math.backward(dn, x, real, shift, scale, p, HEAD_DIM, NORM)
        gains += dy * n
        biases += dy
        dx = (direct + dx).to(result.dtype.element_ty)
        tl.store(result + _entries((result_batch, result_head, result_row), batch, head, rows, columns), dx, mask=live)
    if dgain is not None:
        tl.store(dgain + slot + columns, tl.sum(gains, 0), mask=real)
    if dbias is not None:
        tl.store(dbias + slot + columns, tl.sum(biases, 0), mask=real)


@triton.jit
def prologue_gradient_kernel(
    q, k, q_norm, k_norm, rotary, factor, count, total, length,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The way back for q and k. Sums are `[programs, H or Hk, D]`, a program for each batch and STEPS·BLOCK rows."""
    batch, head, chunk = _place(total, length, BLOCK * STEPS)
    program = (tl.program_id(0) // total).to(tl.int64)
    if head < count:
        _pull_back(
            q, q_norm, rotary, factor, batch, head, chunk, length, (program * count + head) * HEAD_DIM,
            BLOCK, STEPS, PADDED, HEAD_DIM, Q_NORM, ROTARY, INTERLEAVED,
        )  # fmt: skip
    elif k is not None:
        _pull_back(
            k, k_norm, rotary, 1.0, batch, head - count, chunk, length,
            (program * (total - count) + head - count) * HEAD_DIM,
            BLOCK, STEPS, PADDED, HEAD_DIM, K_NORM, ROTARY, INTERLEAVED,
        )  # fmt: skip
