"""Attention, backward, without atomics: a kernel for dk and dv, one for dq; both undo RoPE and norm before they store.

The weights are recomputed from their normaliser. In fp32 both its parts are kept (EXACT): one number, the log-sum-exp,
would round away what large logits need. A score is q·k (times `unit` if SCALED); its logit in units of log2 is
`cap`·tanh(score), or `cap`·score without a cap; what is left of the chain rule is one factor, `outer`, at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_qknorm.ops.triton.norm_math import backward, partners, statistics
from hf_qknorm.ops.triton.score_math import (
    kept,
    keys_seen,
    not_mine,
    queries_seeing,
    query_block,
    segments,
    tanh_and_slope,
)

ALIGNED: tl.constexpr = tl.constexpr(128)  # rows of a head in `sums` are padded to this, so that tiles need no mask


@triton.jit
def sums_kernel(
    OUT, GRAD, normaliser, sums, heads, queries, BLOCK_M: tl.constexpr, PADDED: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Numbers of each row, `[B, H, 3, T′]`: log-sum-exp, Σ out·grad, which the softmax's gradient subtracts, nothing.

    If EXACT, the first is the peak, and the last 1/total. For a row without keys the first is +∞.
    """
    stride = tl.cdiv(queries, ALIGNED) * ALIGNED
    blocks = stride // BLOCK_M
    number = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BLOCK_M
    at = [number // heads, number % heads, start, 0]
    out = OUT.load(at).reshape(BLOCK_M, PADDED).to(tl.float32)
    grad = GRAD.load(at).reshape(BLOCK_M, PADDED).to(tl.float32)
    rows = start + tl.arange(0, BLOCK_M)
    sums += 3 * number.to(tl.int64) * stride + rows
    own = normaliser + 2 * (number.to(tl.int64) * queries + rows)
    peak = tl.load(own, mask=rows < queries, other=0.0)
    total = tl.load(own + 1, mask=rows < queries, other=0.0)
    empty = total == 0  # not so for NaN, which goes on
    if EXACT:
        tl.store(sums, tl.where(empty, float("inf"), peak))
        tl.store(sums + 2 * stride, tl.where(empty, 0.0, 1.0 / total))
    else:
        tl.store(sums, tl.where(empty, float("inf"), peak + tl.log2(total)))
    tl.store(sums + stride, tl.sum(out * grad, 1))


@triton.jit
def weights(
    x, lse, share, seen, unit, cap, MASKED: tl.constexpr, TANH: tl.constexpr, SCALED: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """The weights of a tile of scores x, and those weights times the slope of the cap.

    If EXACT, `lse` is the rows' peak and `share` 1/total; else it is their log-sum-exp.
    """
    if SCALED:
        x = x * unit
    slope = 1.0
    if TANH != "none":
        x, slope = tanh_and_slope(x, TANH)
    x = x * cap - lse
    if MASKED:
        x = tl.where(seen, x, float("-inf"))
    p = tl.exp2(x)
    if EXACT:
        p = p * share
    return p, p * slope


@triton.jit
def finish(
    grad, X, DX, batch, head, start, length, norm, rotary,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the raw rows X, for the gradient `[M, D]` of what norm and RoPE made of them.

    Heads without padding and rotated whole, in halves: with others this would not fit into the registers. `norm` and
    `rotary` are those of `arguments`, the norm with room for dgain and dbias `[programs, D]`.
    """
    columns = tl.arange(0, PADDED)
    if ROTATED:
        cos, cos_batch, cos_row, cos_pair, sin, sin_batch, sin_row, sin_pair = rotary
        other, angle, sign = partners(columns, PADDED, False)
        cos += batch.to(tl.int64) * cos_batch + start.to(tl.int64) * cos_row
        sin += batch.to(tl.int64) * sin_batch + start.to(tl.int64) * sin_row
        row = tl.arange(0, BLOCK)[:, None]
        there = row + start < length
        swapped = tl.gather(grad, other[None, :] + tl.zeros([BLOCK, PADDED], tl.int32), 1)
        c = tl.load(cos + row * cos_row + angle[None, :] * cos_pair, mask=there, other=1.0).to(tl.float32)
        s = tl.load(sin + row * sin_row + angle[None, :] * sin_pair, mask=there, other=0.0).to(tl.float32)
        grad = grad * c - swapped * (sign[None, :] * s)
    if NORM is not None:
        gain, head_stride, column_stride, bias, bias_head, bias_column, blend, stored_eps, eps, p, dgain, dbias = norm
        x = X.load([batch, head, start, 0]).reshape(BLOCK, PADDED).to(tl.float32)
        real = columns >= 0
        shift, factor = statistics(x, real, stored_eps, eps, p, PADDED, NORM)
        dx = grad * 0.0
        if blend is not None:
            share = tl.load(blend).to(tl.float32)
            dx = grad * (1.0 - share)
            grad = grad * share
        dn = grad
        if gain is not None:
            dn = grad * tl.load(gain + head * head_stride + columns * column_stride).to(tl.float32)[None, :]
        dnormed, n = backward(dn, x, real, shift, factor, p, PADDED, NORM)
        mine = tl.program_id(0).to(tl.int64) * PADDED + columns
        if gain is not None:
            tl.store(dgain + mine, tl.sum(grad * n, 0))
        if dbias is not None:
            there = (tl.arange(0, BLOCK) + start < length)[:, None]  # past the end are weights, but no rows
            tl.store(dbias + mine, tl.sum(tl.where(there, grad, 0.0), 0))
        grad = dx + dnormed
    DX.store([batch, head, start, 0], grad.to(DX.dtype).reshape(1, 1, BLOCK, PADDED))


@triton.jit
def _into_queries(
    dq, q, grad, K, V, batch, head_kv, number, rows, first, last, lse, share, delta, start, stop, unit, cap, seed, rate,
    BLOCK_N: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, TANH: tl.constexpr,
    SCALED: tl.constexpr, EXACT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys from `start` to `stop` give to dq `[M, P]`."""
    cols = tl.arange(0, BLOCK_N)
    for n in tl.range(start, stop, BLOCK_N):
        n = tl.multiple_of(n, BLOCK_N)
        k = K.load([batch, head_kv, n, 0]).reshape(BLOCK_N, PADDED)
        v = V.load([batch, head_kv, n, 0]).reshape(BLOCK_N, PADDED)
        x = tl.dot(q, k.T, input_precision=PRECISION)  # [M, N]
        seen = (cols[None, :] >= (first - n)[:, None]) & (cols[None, :] < (last - n)[:, None])
        _, p = weights(x, lse[:, None], share[:, None], seen, unit, cap, MASKED, TANH, SCALED, EXACT)
        dp = tl.dot(grad, v.T, input_precision=PRECISION)
        if DROPOUT:
            keep = kept(seed, number, rows[:, None], (n + cols)[None, :], rate)
            dp = tl.where(keep, dp / (1.0 - rate), 0.0)
        dx = p * (dp - delta[:, None])
        dq = tl.dot(dx.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def query_kernel(
    Q, K, V, GRAD, X, DX, sums, bound, ranges, seeds, norm, rotary,
    unit, cap, outer, rate, limit, heads, heads_kv, queries, keys, window,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RANGES: tl.constexpr,
    TANH: tl.constexpr, WHEN: tl.constexpr, SCALED: tl.constexpr, EXACT: tl.constexpr, DROPOUT: tl.constexpr,
    NORM: tl.constexpr, ROTATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the raw queries, one program a block of queries and a head."""
    block, number, batch, head, head_kv = query_block(queries, heads, heads_kv, BLOCK_M, CAUSAL)
    if not_mine(bound, batch * heads_kv + head_kv, limit, WHEN):
        return
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    first, last = keys_seen(rows, ranges, batch, queries, keys, window, CAUSAL, WINDOW, RANGES)
    low, low_last = keys_seen(block * BLOCK_M, ranges, batch, queries, keys, window, CAUSAL, WINDOW, RANGES)
    high, high_last = keys_seen(
        block * BLOCK_M + BLOCK_M - 1, ranges, batch, queries, keys, window, CAUSAL, WINDOW, RANGES
    )
    start, full_start, full_stop, stop = segments(low, low_last, high, high_last, BLOCK_N)
    seed = 0
    if DROPOUT:
        seed = tl.load(seeds)
    stride = tl.cdiv(queries, ALIGNED) * ALIGNED
    sums += 3 * number.to(tl.int64) * stride + rows
    lse = tl.load(sums)
    share = lse
    if EXACT:
        share = tl.load(sums + 2 * stride)
    delta = tl.load(sums + stride)
    q = Q.load([batch, head, block * BLOCK_M, 0]).reshape(BLOCK_M, PADDED)
    grad = GRAD.load([batch, head, block * BLOCK_M, 0]).reshape(BLOCK_M, PADDED)
    dq = tl.zeros([BLOCK_M, PADDED], tl.float32)
    if WINDOW or RANGES:
        dq = _into_queries(
            dq, q, grad, K, V, batch, head_kv, number, rows, first, last, lse, share, delta, start,
            tl.minimum(full_start, stop), unit, cap, seed, rate,
            BLOCK_N, PADDED, True, TANH, SCALED, EXACT, DROPOUT, PRECISION,
        )  # fmt: skip
    dq = _into_queries(
        dq, q, grad, K, V, batch, head_kv, number, rows, first, last, lse, share, delta, full_start, full_stop, unit,
        cap, seed, rate, BLOCK_N, PADDED, False, TANH, SCALED, EXACT, DROPOUT, PRECISION,
    )  # fmt: skip
    dq = _into_queries(
        dq, q, grad, K, V, batch, head_kv, number, rows, first, last, lse, share, delta, full_stop, stop, unit, cap,
        seed, rate, BLOCK_N, PADDED, True, TANH, SCALED, EXACT, DROPOUT, PRECISION,
    )  # fmt: skip
    finish(
        dq * outer, X, DX, batch, head, block * BLOCK_M, queries, norm, rotary,
        BLOCK_M, PADDED, NORM, ROTATED,
    )  # fmt: skip


@triton.jit
def _into_keys(
    dk, dv, k, v, Q, GRAD, sums, batch, head, number, group, stride, cols, first, last, start, count,
    unit, cap, seed, rate,
    BLOCK_M: tl.constexpr, PADDED: tl.constexpr, FROM: tl.constexpr, UNTIL: tl.constexpr, TANH: tl.constexpr,
    SCALED: tl.constexpr, EXACT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv `[N, P]` what `count` blocks of queries from `start` on give, of each head of the group.

    One loop for all heads and tiles `[N, M]`: nested, or twice, with a mask and without, it does not fit the registers.
    """
    rows = tl.arange(0, BLOCK_M)
    span = tl.maximum(last - first, 0).to(tl.uint32, bitcast=True)
    member = 0
    block = 0
    for _ in tl.range(0, group * count):
        m = tl.multiple_of(start + block * BLOCK_M, BLOCK_M)
        q = Q.load([batch, head + member, m, 0]).reshape(BLOCK_M, PADDED)
        grad = GRAD.load([batch, head + member, m, 0]).reshape(BLOCK_M, PADDED)
        at = 3 * member * stride + m
        lse = tl.load(sums + at + rows)
        share = lse
        if EXACT:
            share = tl.load(sums + at + 2 * stride + rows)
        x = tl.dot(k, q.T, input_precision=PRECISION)
        seen = True
        if UNTIL:  # both ends in one comparison: below its first, a row is a huge number
            seen = (rows[None, :] + (m - first)[:, None]).to(tl.uint32, bitcast=True) < span[:, None]
        elif FROM:
            seen = rows[None, :] >= (first - m)[:, None]
        p, sloped = weights(x, lse[None, :], share[None, :], seen, unit, cap, FROM or UNTIL, TANH, SCALED, EXACT)
        if DROPOUT:
            keep = kept(seed, number + member, (m + rows)[None, :], cols[:, None], rate)
            p = tl.where(keep, p / (1.0 - rate), 0.0)
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        dp = tl.dot(v, grad.T, input_precision=PRECISION)  # after dv: both at once would not fit either
        if DROPOUT:
            dp = tl.where(keep, dp / (1.0 - rate), 0.0)
        delta = tl.load(sums + at + stride + rows)
        dx = sloped * (dp - delta[None, :])
        dk = tl.dot(dx.to(q.dtype), q, dk, input_precision=PRECISION)
        block += 1
        member += (block == count).to(tl.int32)
        block = tl.where(block == count, 0, block)
    return dk, dv


@triton.jit
def key_kernel(
    Q, K, V, GRAD, X, DX, DV, sums, bound, ranges, seeds, norm, rotary,
    unit, cap, outer, rate, limit, heads, heads_kv, queries, keys, window,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RANGES: tl.constexpr,
    TANH: tl.constexpr, WHEN: tl.constexpr, SCALED: tl.constexpr, EXACT: tl.constexpr, DROPOUT: tl.constexpr,
    NORM: tl.constexpr, ROTATED: tl.constexpr, PRECISION: tl.constexpr,
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
    start, _ = queries_seeing(block * BLOCK_N, ranges, batch, queries, keys, window, CAUSAL, WINDOW, RANGES)
    start = start // BLOCK_M * BLOCK_M
    _, stop = queries_seeing(
        block * BLOCK_N + BLOCK_N - 1, ranges, batch, queries, keys, window, CAUSAL, WINDOW, RANGES
    )
    seed = 0
    if DROPOUT:
        seed = tl.load(seeds)
    k = K.load([batch, head_kv, block * BLOCK_N, 0]).reshape(BLOCK_N, PADDED)
    v = V.load([batch, head_kv, block * BLOCK_N, 0]).reshape(BLOCK_N, PADDED)
    dk = tl.zeros([BLOCK_N, PADDED], tl.float32)
    dv = tl.zeros([BLOCK_N, PADDED], tl.float32)
    group = heads // heads_kv
    head = head_kv * group
    stride = tl.cdiv(queries, ALIGNED) * ALIGNED
    first_head = batch * heads + head
    sums += 3 * first_head.to(tl.int64) * stride
    dk, dv = _into_keys(
        dk, dv, k, v, Q, GRAD, sums, batch, head, first_head, group, stride, cols, first, last,
        start, tl.cdiv(tl.maximum(stop - start, 0), BLOCK_M), unit, cap, seed, rate,
        BLOCK_M, PADDED, CAUSAL or WINDOW or RANGES, WINDOW or RANGES, TANH, SCALED, EXACT, DROPOUT, PRECISION,
    )  # fmt: skip
    DV.store([batch, head_kv, block * BLOCK_N, 0], dv.to(DV.dtype).reshape(1, 1, BLOCK_N, PADDED))
    finish(
        dk * outer, X, DX, batch, head_kv, block * BLOCK_N, keys, norm, rotary,
        BLOCK_N, PADDED, NORM, ROTATED,
    )  # fmt: skip
