"""Attention, backward, without atomics: one kernel for dk and dv, one for dq; both undo RoPE and norm before they store.

The weights are recomputed from the log-sum-exp. A score is q·k (times `unit` if SCALED); its logit in units of log2 is
`cap`·tanh(score), or `cap`·score without a cap; what is left of the chain rule is one factor, `outer`, at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_qknorm.ops.triton.rows import backward, partners, statistics
from hf_qknorm.ops.triton.scores import kept, keys_seen, not_mine, queries_seeing, segments, tanh


@triton.jit
def delta_kernel(OUT, GRAD, delta, heads, queries, BLOCK_M: tl.constexpr, PADDED: tl.constexpr):
    """Σ out·grad of each row, `[B, H, T]`: what the softmax's gradient subtracts."""
    blocks = tl.cdiv(queries, BLOCK_M)
    number = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BLOCK_M
    at = [number // heads, number % heads, start, 0]
    out = OUT.load(at).reshape(BLOCK_M, PADDED).to(tl.float32)
    grad = GRAD.load(at).reshape(BLOCK_M, PADDED).to(tl.float32)
    rows = start + tl.arange(0, BLOCK_M)
    tl.store(delta + number.to(tl.int64) * queries + rows, tl.sum(out * grad, 1), mask=rows < queries)


@triton.jit
def gradients(
    x, dp, lse, delta, seen, keep, unit, cap, rate,
    MASKED: tl.constexpr, TANH: tl.constexpr, SCALED: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """The weights that met the values, and the gradient of the scores but for a factor, of a tile of scores x."""
    if SCALED:
        x = x * unit
    slope = 1.0
    if TANH != "none":
        x = tanh(x, TANH)
        slope = 1.0 - x * x
    x = x * cap - lse
    if MASKED:
        x = tl.where(seen, x, float("-inf"))
    p = tl.exp2(x)
    dropped = p
    if DROPOUT:
        dropped = tl.where(keep, p / (1.0 - rate), 0.0)
        dp = tl.where(keep, dp / (1.0 - rate), 0.0)
    return dropped, p * (dp - delta) * slope


@triton.jit
def finish(
    grad, X, DX, batch, head, start, length, norm, rotary,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the raw rows X, for the gradient `[M, P]` of what norm and RoPE made of them.

    `norm` is (gain, its strides a head and a column, blend, eps, p, partials of dgain, of dbias `[programs, P]`).
    """
    columns = tl.arange(0, PADDED)
    rows = start + tl.arange(0, BLOCK)
    grad = tl.where((rows < length)[:, None], grad, 0.0)  # past the end there are weights, but no rows
    if ROTARY > 0:
        cos, sin, batch_stride, row_stride, pair_stride = rotary
        other, angle, sign = partners(columns, ROTARY, INTERLEAVED)
        rows = tl.minimum(rows, length - 1)
        at = batch.to(tl.int64) * batch_stride + rows[:, None].to(tl.int64) * row_stride + angle[None, :] * pair_stride
        turned = (columns < ROTARY)[None, :]
        swapped = tl.gather(grad, other[None, :] + tl.zeros([BLOCK, PADDED], tl.int32), 1)
        c = tl.load(cos + at, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + at, mask=turned, other=0.0).to(tl.float32)
        grad = grad * c - swapped * (sign[None, :] * s)
    if NORM != "none":
        gain, head_stride, column_stride, blend, eps, p, dgain, dbias = norm
        real = columns < HEAD_DIM
        x = X.load([batch, head, start, 0]).reshape(BLOCK, PADDED).to(tl.float32)
        shift, factor = statistics(x, real, eps, p, HEAD_DIM, NORM)
        dx = grad * 0.0
        if blend is not None:
            share = tl.load(blend).to(tl.float32)
            dx = grad * (1.0 - share)
            grad = grad * share
        dn = grad
        if gain is not None:
            g = tl.load(gain + head * head_stride + columns * column_stride, mask=real, other=0.0).to(tl.float32)
            dn = grad * g[None, :]
        dnormed, n = backward(dn, x, real, shift, factor, p, HEAD_DIM, NORM)
        mine = tl.program_id(0).to(tl.int64) * PADDED + columns
        if gain is not None:
            tl.store(dgain + mine, tl.sum(grad * n, 0))
        if dbias is not None:
            tl.store(dbias + mine, tl.sum(grad, 0))
        grad = dx + dnormed
    DX.store([batch, head, start, 0], grad.to(DX.dtype).reshape(1, 1, BLOCK, PADDED))


@triton.jit
def _into_queries(
    dq, q, grad, K, V, batch, head_kv, number, rows, first, last, lse, delta, start, stop, unit, cap, seed, rate,
    BLOCK_N: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, TANH: tl.constexpr,
    SCALED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys from `start` to `stop` give to dq `[M, P]`."""
    cols = tl.arange(0, BLOCK_N)
    for n in tl.range(start, stop, BLOCK_N):
        n = tl.multiple_of(n, BLOCK_N)
        k = K.load([batch, head_kv, n, 0]).reshape(BLOCK_N, PADDED)
        v = V.load([batch, head_kv, n, 0]).reshape(BLOCK_N, PADDED)
        x = tl.dot(q, k.T, input_precision=PRECISION)  # [M, N]
        dp = tl.dot(grad, v.T, input_precision=PRECISION)
        seen = (cols[None, :] >= (first - n)[:, None]) & (cols[None, :] < (last - n)[:, None])
        keep = seen
        if DROPOUT:
            keep = kept(seed, number, rows[:, None], (n + cols)[None, :], rate)
        _, dx = gradients(
            x, dp, lse[:, None], delta[:, None], seen, keep, unit, cap, rate, MASKED, TANH, SCALED, DROPOUT
        )
        dq = tl.dot(dx.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def query_kernel(
    Q, K, V, GRAD, X, DX, lses, deltas, bound, ranges, seeds, norm, rotary,
    unit, cap, outer, rate, limit, heads, heads_kv, queries, keys, window,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RANGES: tl.constexpr,
    TANH: tl.constexpr, WHEN: tl.constexpr, SCALED: tl.constexpr, DROPOUT: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the raw queries, one program a block of queries and a head."""
    blocks = tl.cdiv(queries, BLOCK_M)
    number = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest first: the last to end are short
    batch = number // heads
    head = number % heads
    head_kv = head // (heads // heads_kv)
    if not_mine(bound, batch * heads_kv + head_kv, limit, WHEN):
        return
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    first, last = keys_seen(rows, ranges, batch, queries, keys, window, CAUSAL, WINDOW, RANGES)
    start, full_start, full_stop, stop = segments(first, last, BLOCK_N)
    seed = 0
    if DROPOUT:
        seed = tl.load(seeds)
    at = number.to(tl.int64) * queries + rows
    lse = tl.load(lses + at, mask=rows < queries, other=float("inf"))
    delta = tl.load(deltas + at, mask=rows < queries, other=0.0)
    q = Q.load([batch, head, block * BLOCK_M, 0]).reshape(BLOCK_M, PADDED)
    grad = GRAD.load([batch, head, block * BLOCK_M, 0]).reshape(BLOCK_M, PADDED)
    dq = tl.zeros([BLOCK_M, PADDED], tl.float32)
    if WINDOW or RANGES:
        dq = _into_queries(
            dq, q, grad, K, V, batch, head_kv, number, rows, first, last, lse, delta, start,
            tl.minimum(full_start, stop), unit, cap, seed, rate,
            BLOCK_N, PADDED, True, TANH, SCALED, DROPOUT, PRECISION,
        )  # fmt: skip
    dq = _into_queries(
        dq, q, grad, K, V, batch, head_kv, number, rows, first, last, lse, delta, full_start, full_stop, unit, cap,
        seed, rate, BLOCK_N, PADDED, False, TANH, SCALED, DROPOUT, PRECISION,
    )  # fmt: skip
    dq = _into_queries(
        dq, q, grad, K, V, batch, head_kv, number, rows, first, last, lse, delta, full_stop, stop, unit, cap,
        seed, rate, BLOCK_N, PADDED, True, TANH, SCALED, DROPOUT, PRECISION,
    )  # fmt: skip
    finish(
        dq * outer, X, DX, batch, head, block * BLOCK_M, queries, norm, rotary,
        BLOCK_M, PADDED, HEAD_DIM, NORM, ROTARY, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _into_keys(
    dk, dv, k, v, Q, GRAD, batch, head, number, cols, first, last, lses, deltas, start, stop, queries,
    unit, cap, seed, rate,
    BLOCK_M: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, TANH: tl.constexpr,
    SCALED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries from `start` to `stop` of one head give to dk and dv `[N, P]`; tiles are `[N, M]`."""
    rows = tl.arange(0, BLOCK_M)
    for m in tl.range(start, stop, BLOCK_M):
        m = tl.multiple_of(m, BLOCK_M)
        q = Q.load([batch, head, m, 0]).reshape(BLOCK_M, PADDED)
        grad = GRAD.load([batch, head, m, 0]).reshape(BLOCK_M, PADDED)
        at = number.to(tl.int64) * queries + m + rows
        lse = tl.load(lses + at, mask=m + rows < queries, other=float("inf"))
        delta = tl.load(deltas + at, mask=m + rows < queries, other=0.0)
        x = tl.dot(k, q.T, input_precision=PRECISION)
        dp = tl.dot(v, grad.T, input_precision=PRECISION)
        seen = (rows[None, :] >= (first - m)[:, None]) & (rows[None, :] < (last - m)[:, None])
        keep = seen
        if DROPOUT:
            keep = kept(seed, number, (m + rows)[None, :], cols[:, None], rate)
        p, dx = gradients(
            x, dp, lse[None, :], delta[None, :], seen, keep, unit, cap, rate, MASKED, TANH, SCALED, DROPOUT
        )
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        dk = tl.dot(dx.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_kernel(
    Q, K, V, GRAD, X, DX, DV, lses, deltas, bound, ranges, seeds, norm, rotary,
    unit, cap, outer, rate, limit, heads, heads_kv, queries, keys, window,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RANGES: tl.constexpr,
    TANH: tl.constexpr, WHEN: tl.constexpr, SCALED: tl.constexpr, DROPOUT: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of the raw keys and of the values, one program a block of keys, over the heads of its group."""
    blocks = tl.cdiv(keys, BLOCK_N)
    number = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    batch = number // heads_kv
    head_kv = number % heads_kv
    if not_mine(bound, number, limit, WHEN):
        return
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    first, last = queries_seeing(cols, ranges, batch, queries, keys, window, CAUSAL, WINDOW, RANGES)
    start, full_start, full_stop, stop = segments(first, last, BLOCK_M)
    if not (WINDOW or RANGES):
        full_stop = stop  # queries past the end have no weights: nothing to mask
    seed = 0
    if DROPOUT:
        seed = tl.load(seeds)
    k = K.load([batch, head_kv, block * BLOCK_N, 0]).reshape(BLOCK_N, PADDED)
    v = V.load([batch, head_kv, block * BLOCK_N, 0]).reshape(BLOCK_N, PADDED)
    dk = tl.zeros([BLOCK_N, PADDED], tl.float32)
    dv = tl.zeros([BLOCK_N, PADDED], tl.float32)
    group = heads // heads_kv
    for member in tl.range(0, group):
        head = head_kv * group + member
        query_head = batch * heads + head
        if CAUSAL or WINDOW or RANGES:
            dk, dv = _into_keys(
                dk, dv, k, v, Q, GRAD, batch, head, query_head, cols, first, last, lses, deltas, start,
                tl.minimum(full_start, stop), queries, unit, cap, seed, rate, BLOCK_M, PADDED, True, TANH, SCALED, DROPOUT, PRECISION,
            )  # fmt: skip
        dk, dv = _into_keys(
            dk, dv, k, v, Q, GRAD, batch, head, query_head, cols, first, last, lses, deltas, full_start, full_stop,
            queries, unit, cap, seed, rate, BLOCK_M, PADDED, False, TANH, SCALED, DROPOUT, PRECISION,
        )  # fmt: skip
        if WINDOW or RANGES:
            dk, dv = _into_keys(
                dk, dv, k, v, Q, GRAD, batch, head, query_head, cols, first, last, lses, deltas, full_stop, stop,
                queries, unit, cap, seed, rate, BLOCK_M, PADDED, True, TANH, SCALED, DROPOUT, PRECISION,
            )  # fmt: skip
    DV.store([batch, head_kv, block * BLOCK_N, 0], dv.to(DV.dtype).reshape(1, 1, BLOCK_N, PADDED))
    finish(
        dk * outer, X, DX, batch, head_kv, block * BLOCK_N, keys, norm, rotary,
        BLOCK_N, PADDED, HEAD_DIM, NORM, ROTARY, INTERLEAVED,
    )  # fmt: skip
