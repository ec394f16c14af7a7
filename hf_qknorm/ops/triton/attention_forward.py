"""Attention, forward: one program a block of queries and a head, over the keys that it sees, tile by tile.

Scores are in units of log2, so that e^x is one exp2. Bounded scores need no running maximum: 2^x can't overflow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_qknorm.ops.triton.score_math import LOG2E, kept, keys_seen, not_mine, query_block, segments, tanh

NEVER = tl.constexpr(-1.0e30)  # a maximum over no keys; finite, so that differences are never NaN


@triton.jit
def from_sink(sinks, head):
    """Peak and total of a head's sink alone, in units of log2; a sink of −∞ is none."""
    logit = tl.load(sinks + head).to(tl.float32) * LOG2E
    none = logit == float("-inf")
    return tl.where(none, NEVER, logit), tl.where(none, 0.0, 1.0)


@triton.jit
def attend(
    acc, total, peak, heat, largest,
    q, K, V, batch, head_kv, head, rows, first, last, start, stop, unit, cap, seed, rate,
    BLOCK_N: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, TANH: tl.constexpr, ONLINE: tl.constexpr,
    SCALED: tl.constexpr, DROPOUT: tl.constexpr, STATISTICS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys from `start` to `stop` into the sums: acc `[M, P]`, total, peak, heat, largest `[M]`.

    Weights are 2^(logit − peak) if ONLINE, else 2^logit. `peak` is the largest logit so far, kept if ONLINE or
    STATISTICS; `heat` is Σ weight·(logit − peak): it is exact however large the logits are.
    """
    cols = tl.arange(0, BLOCK_N)
    for n in tl.range(start, stop, BLOCK_N):
        n = tl.multiple_of(n, BLOCK_N)
        k = K.load([batch, head_kv, n, 0]).reshape(BLOCK_N, PADDED)
        x = tl.dot(q, k.T, input_precision=PRECISION)  # [M, N]
        if SCALED:
            x = x * unit
        if STATISTICS:
            seen = ((n + cols)[None, :] >= first[:, None]) & ((n + cols)[None, :] < last[:, None])
            largest = tl.maximum(largest, tl.max(tl.where(seen, tl.abs(x), 0.0), 1))
        if TANH != "none":
            x = tanh(x, TANH)
        if MASKED:
            seen = (cols[None, :] >= (first - n)[:, None]) & (cols[None, :] < (last - n)[:, None])
            x = tl.where(seen, x, float("-inf"))
        if ONLINE:
            higher = tl.maximum(peak, tl.max(x, 1) * cap)
            x = x * cap - higher[:, None]
            shrink = tl.exp2(peak - higher)
            acc = acc * shrink[:, None]
            if STATISTICS:
                heat = (heat + total * (peak - higher)) * shrink
            total = total * shrink
            peak = higher
        elif TANH != "none":
            x = x * cap
        p = tl.exp2(x)
        if STATISTICS:
            if not ONLINE:
                higher = tl.maximum(peak, tl.max(x, 1))
                heat += total * (peak - higher)
                x = x - higher[:, None]
                peak = higher
            heat += tl.sum(tl.where(p > 0, p * x, 0.0), 1)
        total += tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(kept(seed, head, rows[:, None], (n + cols)[None, :], rate), p, 0.0)
        v = V.load([batch, head_kv, n, 0]).reshape(BLOCK_N, PADDED)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, total, peak, heat, largest


@triton.jit
def forward_kernel(
    Q, K, V, OUT, normaliser, bound, ranges, sinks, seeds, largest_out, entropy_out,
    unit, cap, rate, limit, heads, heads_kv, queries, keys, window,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RANGES: tl.constexpr,
    TANH: tl.constexpr, ONLINE: tl.constexpr, WHEN: tl.constexpr,
    SCALED: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr, STATISTICS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Output `[B, H, T, D]` and normaliser `[B, H, T, 2]`; both are 0 for a query without keys, but for its peak.

    Q, K, V, OUT are descriptors `[B, H or Hk, T or S, D]`; a score is q·k (times `unit` if SCALED), its logit in units
    of log2 is `cap`·tanh(score), or `cap`·score without a cap.
    """
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
    q = Q.load([batch, head, block * BLOCK_M, 0]).reshape(BLOCK_M, PADDED)
    acc = tl.zeros([BLOCK_M, PADDED], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    heat = total
    largest = total
    peak = total
    if ONLINE or STATISTICS:
        peak = total + NEVER
    if SINKS:
        sink, weight = from_sink(sinks, head)
        peak = tl.zeros([BLOCK_M], tl.float32) + sink
        total = total + weight
    if WINDOW or RANGES:
        acc, total, peak, heat, largest = attend(
            acc, total, peak, heat, largest,
            q, K, V, batch, head_kv, number, rows, first, last, start, tl.minimum(full_start, stop), unit, cap, seed,
            rate, BLOCK_N, PADDED, True, TANH, ONLINE, SCALED, DROPOUT, STATISTICS, PRECISION,
        )  # fmt: skip
    acc, total, peak, heat, largest = attend(
        acc, total, peak, heat, largest,
        q, K, V, batch, head_kv, number, rows, first, last, full_start, full_stop, unit, cap, seed, rate,
        BLOCK_N, PADDED, False, TANH, ONLINE, SCALED, DROPOUT, STATISTICS, PRECISION,
    )  # fmt: skip
    acc, total, peak, heat, largest = attend(
        acc, total, peak, heat, largest,
        q, K, V, batch, head_kv, number, rows, first, last, full_stop, stop, unit, cap, seed, rate,
        BLOCK_N, PADDED, True, TANH, ONLINE, SCALED, DROPOUT, STATISTICS, PRECISION,
    )  # fmt: skip
    empty = total == 0  # not so for NaN, which goes on
    share = tl.where(empty, 0.0, 1.0 / total)
    at = number.to(tl.int64) * queries + rows
    if STATISTICS:
        tl.store(largest_out + at, largest, mask=rows < queries)
        spread = total  # of the weights that have their largest at 1
        if not ONLINE:
            spread = total * tl.exp2(-peak)
            peak = tl.zeros([BLOCK_M], tl.float32)
        tl.store(entropy_out + at, tl.where(empty, 0.0, tl.log2(spread) - heat * share), mask=rows < queries)
    tl.store(normaliser + 2 * at, peak, mask=rows < queries)
    tl.store(normaliser + 2 * at + 1, total, mask=rows < queries)
    if DROPOUT:
        share = share / (1.0 - rate)
    out = (acc * share[:, None]).to(OUT.dtype)
    OUT.store([batch, head, block * BLOCK_M, 0], out.reshape(1, 1, BLOCK_M, PADDED))
