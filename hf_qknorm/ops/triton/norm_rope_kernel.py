"""Norm and RoPE of queries and keys on the device, and their gradients.

Each program has a block of rows of one head. Heads come first in the grid, so that cos and sin are read once from
memory. Unless heads are rotated whole, the other column of a rotated pair is loaded again (it is in L1 by then) and
normed anew, without an exchange between threads. Tensors are `arguments.HeadArguments`, norms `NormArguments`, the
rotation `RotaryArguments`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_qknorm.ops.triton import norm_math


@triton.jit
def _entries(tensor, batch, head, rows, columns):
    """The offsets of a tile's entries, in 64 bits: a batch of long texts has more entries than 32 bits count."""
    start = batch.to(tl.int64) * tensor.batch + head.to(tl.int64) * tensor.head
    return start + rows.to(tl.int64)[:, None] * tensor.row + columns[None, :]


@triton.jit
def _load(x, at, mask):
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_tile(tensor, batch, head, rows, columns, mask):
    return _load(tensor.data, _entries(tensor, batch, head, rows, columns), mask)


@triton.jit
def _per_column(values, head_stride, column_stride, head, columns, HEAD_DIM: tl.constexpr):
    """A gain or a bias, `[1, P]`."""
    return _load(values, head * head_stride + columns * column_stride, columns < HEAD_DIM)[None, :]


@triton.jit
def _normed(x, shift, factor, norm, head, columns, HEAD_DIM: tl.constexpr):
    """The entries x `[M, P]` of these columns after the norm, with gain and bias."""
    y = (x - shift[:, None]) * factor[:, None]
    if norm.gain is not None:
        y = y * _per_column(norm.gain, norm.gain_head, norm.gain_column, head, columns, HEAD_DIM)
    if norm.bias is not None:
        y = y + _per_column(norm.bias, norm.bias_head, norm.bias_column, head, columns, HEAD_DIM)
    return y


@triton.jit
def _rotation(rotary, batch, rows, angle, mask):
    """cos and sin of each entry, 0 where masked."""
    rows = rows.to(tl.int64)[:, None]
    cos = batch.to(tl.int64) * rotary.cos_batch + rows * rotary.cos_row + (angle * rotary.cos_pair)[None, :]
    sin = batch.to(tl.int64) * rotary.sin_batch + rows * rotary.sin_row + (angle * rotary.sin_pair)[None, :]
    return _load(rotary.cos, cos, mask), _load(rotary.sin, sin, mask)


@triton.jit
def _prepare(
    source, result, norm, rotary, bound, group, multiplier, batch, head, block, length,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and multiply one tile; store it; raise the group's bound.

    Heads that are rotated whole, in halves, are two tiles side by side: each thread has both columns of its pairs.
    """
    rows = block * BLOCK + tl.arange(0, BLOCK)
    live = (rows < length)[:, None]
    if ROTARY == PADDED and not INTERLEAVED:
        columns = tl.arange(0, PADDED // 2)
        x = _load_tile(source, batch, head, rows, columns, live)
        z = _load_tile(source, batch, head, rows, columns + PADDED // 2, live)
        whole = tl.join(x, z).reshape(BLOCK, PADDED)  # in another order, which the norm's statistics do not see
        shift, factor, _, _ = norm_math.statistics(whole, tl.arange(0, PADDED) >= 0, norm, HEAD_DIM, NORM)
        x = _normed(x, shift, factor, norm, head, columns, HEAD_DIM)
        z = _normed(z, shift, factor, norm, head, columns + PADDED // 2, HEAD_DIM)
        c, s = _rotation(rotary, batch, rows, columns, live)
        y = ((x * c - z * s) * multiplier).to(result.data.dtype.element_ty)
        z = ((z * c + x * s) * multiplier).to(result.data.dtype.element_ty)
        squares = tl.sum(_squares(y, live), 1) + tl.sum(_squares(z, live), 1)
        tl.store(result.data + _entries(result, batch, head, rows, columns), y, mask=live)
        tl.store(result.data + _entries(result, batch, head, rows, columns + PADDED // 2), z, mask=live)
    else:
        columns = tl.arange(0, PADDED)
        real = columns < HEAD_DIM
        live = live & real[None, :]
        x = _load_tile(source, batch, head, rows, columns, live)
        shift, factor, _, _ = norm_math.statistics(x, real, norm, HEAD_DIM, NORM)
        y = _normed(x, shift, factor, norm, head, columns, HEAD_DIM)
        if ROTARY > 0:
            other, angle, sign = norm_math.partners(columns, ROTARY, INTERLEAVED)
            rotated = live & (columns < ROTARY)[None, :]
            z = _load_tile(source, batch, head, rows, other, rotated)
            z = _normed(z, shift, factor, norm, head, other, HEAD_DIM)
            c, s = _rotation(rotary, batch, rows, angle, rotated)
            y = tl.where(rotated, y * c + z * (s * sign[None, :]), y)
        y = (y * multiplier).to(result.data.dtype.element_ty)
        squares = tl.sum(_squares(y, live), 1)
        tl.store(result.data + _entries(result, batch, head, rows, columns), y, mask=live)
    if bound is not None:
        longest = tl.sqrt_rn(tl.max(squares, 0))
        tl.atomic_max(bound + group, longest.to(tl.int32, bitcast=True), sem="relaxed")  # ≥ 0: ordered as integers are


@triton.jit
def _squares(y, live):
    """The squares of rounded entries, 0 where masked."""
    rounded = tl.where(live, y.to(tl.float32), 0.0)
    return rounded * rounded


@triton.jit
def _place(count, length, ROWS: tl.constexpr):
    """Batch, head and block of rows of this program."""
    number = tl.program_id(0)
    blocks = tl.cdiv(length, ROWS)
    return number // count // blocks, number % count, number // count % blocks


@triton.jit(do_not_specialize=["heads", "heads_kv", "length"])  # lengths may grow: one kernel for all
def norm_rope_kernel(
    q, q_out, k, k_out, q_norm, k_norm, rotary, bound, multiplier, heads, heads_kv, length,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Norm and rotate q, and k if given."""
    batch, head, block = _place(heads + heads_kv, length, BLOCK)
    if head < heads:
        group = (batch * heads_kv + head * heads_kv // heads) * 2
        _prepare(
            q, q_out, q_norm, rotary, bound, group, multiplier, batch, head, block, length,
            BLOCK, PADDED, HEAD_DIM, Q_NORM, ROTARY, INTERLEAVED,
        )  # fmt: skip
    elif k is not None:
        group = (batch * heads_kv + head - heads) * 2 + 1
        _prepare(
            k, k_out, k_norm, rotary, bound, group, 1.0, batch, head - heads, block, length,
            BLOCK, PADDED, HEAD_DIM, K_NORM, ROTARY, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def _raw_gradient(
    grad, source, result, dgain, dbias, norm, rotary, batch, head, chunk, length, slot,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Compute the raw heads' gradient from the results' gradient, tile by tile; store sums at `slot`."""
    columns = tl.arange(0, PADDED)
    real = columns < HEAD_DIM
    gains = tl.zeros([BLOCK, PADDED], tl.float32)
    biases = tl.zeros([BLOCK, PADDED], tl.float32)
    if norm.gain is not None:
        gain = _per_column(norm.gain, norm.gain_head, norm.gain_column, head, columns, HEAD_DIM)
    first = chunk * (BLOCK * STEPS)
    for start in tl.range(first, tl.minimum(first + BLOCK * STEPS, length), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        live = (rows < length)[:, None] & real[None, :]
        dy = _load_tile(grad, batch, head, rows, columns, live)
        if ROTARY > 0:
            other, angle, sign = norm_math.partners(columns, ROTARY, INTERLEAVED)
            rotated = live & (columns < ROTARY)[None, :]
            dz = _load_tile(grad, batch, head, rows, other, rotated)
            c, s = _rotation(rotary, batch, rows, angle, rotated)
            dy = tl.where(rotated, dy * c - dz * (s * sign[None, :]), dy)
        x = _load_tile(source, batch, head, rows, columns, live)
        shift, factor, unit, pull = norm_math.statistics(x, real, norm, HEAD_DIM, NORM)
        dn = dy
        if norm.gain is not None:
            dn = dy * gain
        dx, n = norm_math.backward(dn, x, real, shift, factor, unit, pull, norm.p, HEAD_DIM, NORM)
        gains += dy * n
        biases += dy
        dx = dx.to(result.data.dtype.element_ty)
        tl.store(result.data + _entries(result, batch, head, rows, columns), dx, mask=live)
    if dgain is not None:
        tl.store(dgain + slot + columns, tl.sum(gains, 0), mask=real)
    if dbias is not None:
        tl.store(dbias + slot + columns, tl.sum(biases, 0), mask=real)


@triton.jit(do_not_specialize=["heads", "total", "length"])
def norm_rope_gradient_kernel(
    dq, q, dq_raw, q_dgain, q_dbias, dk, k, dk_raw, k_dgain, k_dbias, q_norm, k_norm, rotary, heads, total, length,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Gradients of raw q, and of k if given. Sums are `[programs, H or Hk, D]`, one for STEPS·BLOCK rows of a batch."""
    batch, head, chunk = _place(total, length, BLOCK * STEPS)
    program = (tl.program_id(0) // total).to(tl.int64)
    if head < heads:
        _raw_gradient(
            dq, q, dq_raw, q_dgain, q_dbias, q_norm, rotary, batch, head, chunk, length,
            (program * heads + head) * HEAD_DIM,
            BLOCK, STEPS, PADDED, HEAD_DIM, Q_NORM, ROTARY, INTERLEAVED,
        )  # fmt: skip
    elif k is not None:
        _raw_gradient(
            dk, k, dk_raw, k_dgain, k_dbias, k_norm, rotary, batch, head - heads, chunk, length,
            (program * (total - heads) + head - heads) * HEAD_DIM,
            BLOCK, STEPS, PADDED, HEAD_DIM, K_NORM, ROTARY, INTERLEAVED,
        )  # fmt: skip
