"""Attention, forward: one program for a block of queries and a head, over the keys that it sees, tile by tile.

Logits are in units of log2, so that e^x is one exp2. The algorithm is derived in `ops/README.md`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hf_qknorm.ops.triton.arguments import Sizes
from hf_qknorm.ops.triton.head_tiles import add_weighted, load_tile, products, store_tile
from hf_qknorm.ops.triton.score_math import (
    LOG2E,
    QueryRows,
    capped,
    drop,
    kept,
    key_segments,
    keys_seen,
    keys_within,
    query_block,
    serves,
)

LOWEST = tl.constexpr(-1.0e30)  # the maximum over no keys: finite, so that differences are never NaN


class Sums(NamedTuple):
    """Sums over keys: acc Σ p·v `[M, P]`, and `[M]` each total Σ p, peak, Σ p·(logit − peak), the largest |score|.

    p is 2^(logit − peak) if ONLINE, else 2^logit. `peak`, the largest logit so far, is kept if ONLINE or STATISTICS,
    and the last two if STATISTICS.
    """

    acc: Any
    total: Any
    peak: Any
    p_logit: Any
    largest: Any


@triton.jit
def from_sink(sinks, head):
    """Peak and total of a head's sink alone, in units of log2; a sink of −∞ is none."""
    logit = tl.load(sinks + head).to(tl.float32) * LOG2E
    none = logit == float("-inf")
    return tl.where(none, LOWEST, logit), tl.where(none, 0.0, 1.0)


@triton.jit
def add_keys(sums, q, K, V, block, rows, start, stop, score, seed, sizes, MASKED: tl.constexpr, C: tl.constexpr):
    """Add the keys from `start` to `stop` to the sums of the queries q `[M, P]`, a `QueryBlock` and its `QueryRows`."""
    acc, total, peak, p_logit, largest = sums
    for n in tl.range(start, stop, C.BLOCK_N):
        n = tl.multiple_of(n, C.BLOCK_N)
        k = load_tile(K, block.batch, block.head_kv, n, sizes.keys, C.BLOCK_N, C, FULL=not MASKED)
        x = products(q, k, C)  # [M, N]
        if C.SCALED:
            x = x * score.unit
        if C.STATISTICS:
            seen = keys_within(n, rows, C)
            largest = tl.maximum(largest, tl.max(tl.where(seen, tl.abs(x), 0.0), 1))
        x = capped(x, score.cap, C)
        if MASKED:
            seen = keys_within(n, rows, C)
            x = tl.where(seen, x, float("-inf"))
        if C.ONLINE:
            higher = tl.maximum(peak, tl.max(x, 1) * score.cap)
            x = x * score.cap - higher[:, None]
            shrink = tl.exp2(peak - higher)
            acc = acc * shrink[:, None]
            if C.STATISTICS:
                p_logit = (p_logit + total * (peak - higher)) * shrink
            total = total * shrink
            peak = higher
        p = tl.exp2(x)
        if C.STATISTICS:
            if not C.ONLINE:
                higher = tl.maximum(peak, tl.max(x, 1))
                p_logit += total * (peak - higher)
                x = x - higher[:, None]
                peak = higher
            p_logit += tl.sum(tl.where(p > 0, p * x, 0.0), 1)
        total += tl.sum(p, 1)
        if C.DROPOUT:
            p = drop(p, kept(seed, block.number, block.start, n, score, C), score)
        v = load_tile(V, block.batch, block.head_kv, n, sizes.keys, C.BLOCK_N, C, FULL=not MASKED)
        acc = add_weighted(acc, p, v, C)
    return Sums(acc, total, peak, p_logit, largest)


@triton.jit
def attend_segments(sums, q, K, V, block, rows, starts, stops, served, score, seed, sizes, C: tl.constexpr):
    """Add the segments of keys of `score_math.key_segments`; none if not `served`."""
    for SEGMENT in tl.static_range(0 if C.WINDOW or C.RANGES else 1, 3):  # without these, no key is hidden at the start
        stop = tl.where(served, stops[SEGMENT], 0)
        sums = add_keys(
            sums, q, K, V, block, rows, starts[SEGMENT], stop, score, seed, sizes, MASKED=SEGMENT != 1, C=C
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=Sizes._fields)
def forward_kernel(
    Q, K, V, OUT, normaliser, bound, ranges, sinks, seeds, largest_out, entropy_out, score,
    heads, heads_kv, queries, keys, window, section, C: tl.constexpr, BEYOND: tl.constexpr = None,
):  # fmt: skip
    """Output `[B, H, T, D]` and normaliser `[B, H, T, 2]`; both are 0 for a query without keys, but for its peak.

    With BEYOND there are two loops, one after the other, and one is empty: C serves the groups of heads whose
    scores are within the limit, BEYOND the others. The branches of a condition would double the shared memory.

    Q, K, V and OUT are `launch.as_tiles` of heads `[B, H or Hk, T or S, D]`; `score` is `arguments.ScoreArguments`.
    """
    sizes = Sizes(heads, heads_kv, queries, keys, window, section)
    block = query_block(sizes, C)
    within = serves(bound, block.batch * heads_kv + block.head_kv, score.limit, C.WHEN)
    index = block.start + tl.arange(0, C.BLOCK_M)
    first, last = keys_seen(index, block.batch, ranges, sizes, C)
    rows = QueryRows(first, last)
    starts, stops = key_segments(block, ranges, sizes, C)
    seed = 0
    if C.DROPOUT:
        seed = tl.load(seeds)
    q = load_tile(Q, block.batch, block.head, block.start, sizes.queries, C.BLOCK_M, C)
    zeros = tl.zeros([C.BLOCK_M], tl.float32)
    total = zeros
    peak = zeros
    if C.ONLINE or C.STATISTICS:
        peak = zeros + LOWEST
    elif BEYOND is not None and BEYOND.ONLINE:
        peak = tl.where(within, zeros, LOWEST)
    if C.SINKS:
        sink, weight = from_sink(sinks, block.head)
        peak = zeros + sink
        total = zeros + weight
    sums = Sums(tl.zeros([C.BLOCK_M, C.PADDED], tl.float32), total, peak, zeros, zeros)
    sums = attend_segments(sums, q, K, V, block, rows, starts, stops, within, score, seed, sizes, C)
    if BEYOND is not None:
        sums = attend_segments(sums, q, K, V, block, rows, starts, stops, ~within, score, seed, sizes, BEYOND)
    acc, total, peak, p_logit, largest = sums
    empty = total == 0  # false for NaN, which reaches the output
    inverse_total = tl.where(empty, 0.0, 1.0 / total)
    at = block.number.to(tl.int64) * sizes.queries + index
    real = index < sizes.queries
    if C.STATISTICS:
        tl.store(largest_out + at, largest, mask=real)
        spread = total  # Σ 2^(logit − peak)
        if not C.ONLINE:
            spread = total * tl.exp2(-peak)
            shift = zeros
            if BEYOND is not None and BEYOND.ONLINE:
                spread, shift = tl.where(within, spread, total), tl.where(within, shift, peak)
            peak = shift
        tl.store(entropy_out + at, tl.where(empty, 0.0, tl.log2(spread) - p_logit * inverse_total), mask=real)
    tl.store(normaliser + 2 * at, peak, mask=real)
    tl.store(normaliser + 2 * at + 1, total, mask=real)
    if C.DROPOUT:
        inverse_total = inverse_total * score.rescale
    out = acc * inverse_total[:, None]
    store_tile(OUT, out, block.batch, block.head, block.start, sizes.queries, C.BLOCK_M, C)
