"""Attention, backward, without atomics: a kernel for dk and dv, one for dq; both undo RoPE and norm before they store.

The gradients are derived in `ops/README.md`. `score` is `arguments.ScoreArguments`, `sizes` `arguments.Sizes`, `C`
`arguments.Constants`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hf_qknorm.ops.triton.arguments import Sizes
from hf_qknorm.ops.triton.head_tiles import add_weighted, load_tile, products, store_tile
from hf_qknorm.ops.triton.score_math import (
    QueryRows,
    drop,
    kept,
    key_segments,
    keys_seen,
    keys_within,
    place,
    queries_seeing,
    query_block,
    serves,
    tanh_and_slope,
)
from hf_qknorm.ops.triton.undo_norm_rope import store_raw_gradient

ALIGNED: tl.constexpr = tl.constexpr(128)  # rows of a head in `row_terms` are padded to this: tiles need no mask


class RowTerms(NamedTuple):
    """Terms of rows `[M]`: their log-sum-exp, or if EXACT their peak and 1/total; δ = Σ out·grad."""

    lse: Any
    inverse_total: Any
    delta: Any


@triton.jit(do_not_specialize=["heads", "queries"])
def row_terms_kernel(OUT, GRAD, normaliser, row_terms, heads, queries, C: tl.constexpr):
    """Terms of each row, `[B, H, 3, T′]`: log-sum-exp (if C.EXACT the peak), δ, and 1/total if C.EXACT.

    For a row without keys the first is +∞, so that its weights are 0.
    """
    stride = tl.cdiv(queries, ALIGNED) * ALIGNED
    blocks = stride // C.BLOCK_M
    number = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * C.BLOCK_M
    out = load_tile(OUT, number // heads, number % heads, start, queries, C.BLOCK_M, C).to(tl.float32)
    grad = load_tile(GRAD, number // heads, number % heads, start, queries, C.BLOCK_M, C).to(tl.float32)
    rows = start + tl.arange(0, C.BLOCK_M)
    row_terms += 3 * number.to(tl.int64) * stride + rows
    own = normaliser + 2 * (number.to(tl.int64) * queries + rows)
    peak = tl.load(own, mask=rows < queries, other=0.0)
    total = tl.load(own + 1, mask=rows < queries, other=0.0)
    empty = total == 0  # false for NaN, which reaches the gradients
    if C.EXACT:
        tl.store(row_terms, tl.where(empty, float("inf"), peak))
        tl.store(row_terms + 2 * stride, tl.where(empty, 0.0, 1.0 / total))
    else:
        tl.store(row_terms, tl.where(empty, float("inf"), peak + tl.log2(total)))
    tl.store(row_terms + stride, tl.sum(out * grad, 1))


@triton.jit
def weights(x, lse, inverse_total, seen, score, MASKED: tl.constexpr, C: tl.constexpr):
    """Weights p of a tile of scores x, and p times the cap's slope; `lse` and `inverse_total` as in `RowTerms`."""
    if C.SCALED:
        x = x * score.unit
    slope = 1.0
    if C.TANH != "none":
        x, slope = tanh_and_slope(x, C.TANH)
    x = x * score.cap - lse
    if MASKED:
        x = tl.where(seen, x, float("-inf"))
    p = tl.exp2(x)
    if C.EXACT:
        p = p * inverse_total
    return p, p * slope


@triton.jit
def score_gradient(sloped, dp, delta, keep, score, C: tl.constexpr):
    """The gradient of a tile of scores, from the gradient of the weights that dropout keeps."""
    return sloped * (tl.where(keep, dp * score.rescale - delta, -delta) if C.DROPOUT else dp - delta)


@triton.jit
def _add_to_queries(
    dq, q, grad, K, V, block, rows, terms, start, stop, score, seed, sizes, MASKED: tl.constexpr, C: tl.constexpr
):
    """Add to dq `[M, P]` the gradient through the keys from `start` to `stop`."""
    for n in tl.range(start, stop, C.BLOCK_N, disable_licm=C.UNHOISTED):
        n = tl.multiple_of(n, C.BLOCK_N)
        k = load_tile(K, block.batch, block.head_kv, n, sizes.keys, C.BLOCK_N, C, FULL=not MASKED)
        v = load_tile(V, block.batch, block.head_kv, n, sizes.keys, C.BLOCK_N, C, FULL=not MASKED)
        x = products(q, k, C)  # [M, N]
        seen = keys_within(n, rows, C)
        _, sloped = weights(x, terms.lse[:, None], terms.inverse_total[:, None], seen, score, MASKED, C)
        keep = True
        if C.DROPOUT:
            keep = kept(seed, block.number, block.start, n, score, C)
        dp = products(grad, v, C)
        dx = score_gradient(sloped, dp, terms.delta[:, None], keep, score, C)
        dq = add_weighted(dq, dx, k, C)
    return dq


@triton.jit
def _add_segments_to_queries(
    dq, q, grad, K, V, block, rows, terms, starts, stops, served, score, seed, sizes, C: tl.constexpr
):
    """Add the segments of keys of `score_math.key_segments`; none if not `served`."""
    for SEGMENT in tl.static_range(0 if C.WINDOW or C.RANGES else 1, 3):  # without these, no key is hidden at the start
        stop = tl.where(served, stops[SEGMENT], 0)
        dq = _add_to_queries(
            dq, q, grad, K, V, block, rows, terms, starts[SEGMENT], stop, score, seed, sizes,
            MASKED=SEGMENT != 1, C=C,
        )  # fmt: skip
    return dq


@triton.jit(do_not_specialize=Sizes._fields)
def query_gradient_kernel(
    Q, K, V, GRAD, X, DX, row_terms, bound, ranges, seeds, norm, dgain, dbias, rotary, factor, score,
    heads, heads_kv, queries, keys, window, section,
    NORM: tl.constexpr, C: tl.constexpr, BEYOND: tl.constexpr = None,
):  # fmt: skip
    """The gradient of the raw queries, a program for a block of queries and a head; loops as in `forward_kernel`."""
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
    stride = tl.cdiv(sizes.queries, ALIGNED) * ALIGNED
    row_terms += 3 * block.number.to(tl.int64) * stride + index
    lse = tl.load(row_terms)
    inverse_total = lse
    if C.EXACT:
        inverse_total = tl.load(row_terms + 2 * stride)
    terms = RowTerms(lse, inverse_total, tl.load(row_terms + stride))
    q = load_tile(Q, block.batch, block.head, block.start, sizes.queries, C.BLOCK_M, C)
    grad = load_tile(GRAD, block.batch, block.head, block.start, sizes.queries, C.BLOCK_M, C)
    dq = tl.zeros([C.BLOCK_M, C.PADDED], tl.float32)
    dq = _add_segments_to_queries(
        dq, q, grad, K, V, block, rows, terms, starts, stops, within, score, seed, sizes, C
    )  # fmt: skip
    if BEYOND is not None:
        dq = _add_segments_to_queries(
            dq, q, grad, K, V, block, rows, terms, starts, stops, ~within, score, seed, sizes, BEYOND
        )  # fmt: skip
    store_raw_gradient(
        dq * factor, X, DX, norm, dgain, dbias, rotary, block.batch, block.head, block.start, queries, C.BLOCK_M,
        NORM, C,
    )  # fmt: skip


@triton.jit
def _add_to_keys(
    dk, dv, k, v, Q, GRAD, row_terms, batch, head, number, stride, own, first, last, start, count, score, seed, sizes,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv `[N, P]` the gradient through tiles of a group's heads from `head` on: `count` of each head,
    blocks of queries from `start` on.

    One loop for all heads and tiles `[N, M]`: nested loops exceed the registers.
    """
    UNTIL: tl.constexpr = C.WINDOW or C.RANGES  # not only queries in front of a key's first one are hidden
    rows = tl.arange(0, C.BLOCK_M)
    span = tl.maximum(last - first, 0).to(tl.uint32, bitcast=True)
    member = 0
    block = 0
    for _ in tl.range(0, sizes.heads // sizes.heads_kv * count, disable_licm=C.UNHOISTED):
        m = tl.multiple_of(start + block * C.BLOCK_M, C.BLOCK_M)
        q = load_tile(Q, batch, head + member, m, sizes.queries, C.BLOCK_M, C)
        grad = load_tile(GRAD, batch, head + member, m, sizes.queries, C.BLOCK_M, C)
        at = 3 * member * stride + m
        lse = tl.load(row_terms + at + rows)
        inverse_total = lse
        if C.EXACT:
            inverse_total = tl.load(row_terms + at + 2 * stride + rows)
        x = products(k, q, C)
        seen = True
        if MASKED and UNTIL:  # both ends in one comparison: in front of `first` the unsigned distance is huge
            seen = (rows[None, :] + (m - first)[:, None]).to(tl.uint32, bitcast=True) < span[:, None]
        elif MASKED:
            seen = rows[None, :] >= (first - m)[:, None]
        p, sloped = weights(x, lse[None, :], inverse_total[None, :], seen, score, MASKED, C)
        keep = True
        if C.DROPOUT:
            keep = kept(seed, number + member, m, own, score, C, TRANSPOSED=True)
            p = drop(p, keep, score)
        if C.OMIT != "values":
            dv = add_weighted(dv, p, grad, C)
        if C.OMIT != "keys":
            dp = products(v, grad, C)  # after dv: both at once do not fit the registers
            delta = tl.load(row_terms + at + stride + rows)
            dx = score_gradient(sloped, dp, delta[None, :], keep, score, C)
            dk = add_weighted(dk, dx, q, C)
        block += 1
        member += (block == count).to(tl.int32)
        block = tl.where(block == count, 0, block)
    return dk, dv


@triton.jit(do_not_specialize=Sizes._fields)
def key_gradient_kernel(
    Q, K, V, GRAD, X, DX, DV, row_terms, bound, ranges, seeds, norm, dgain, dbias, rotary, factor, score,
    heads, heads_kv, queries, keys, window, section, NORM: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradients of the raw keys and of the values: a program for a block of keys, over a group's heads."""
    sizes = Sizes(heads, heads_kv, queries, keys, window, section)
    blocks = tl.cdiv(keys, C.BLOCK_N)
    unit, block = place(blocks, section)
    own = block * C.BLOCK_N
    batch = unit // heads_kv
    head_kv = unit % heads_kv
    if not serves(bound, unit, score.limit, C.WHEN):  # with two loops registers would spill
        return
    cols = own + tl.arange(0, C.BLOCK_N)
    first, last = queries_seeing(cols, batch, ranges, sizes, C)
    start, _ = queries_seeing(own, batch, ranges, sizes, C)
    start = start // C.BLOCK_M * C.BLOCK_M
    _, stop = queries_seeing(own + C.BLOCK_N - 1, batch, ranges, sizes, C)
    count = tl.cdiv(tl.maximum(stop - start, 0), C.BLOCK_M)
    seed = 0
    if C.DROPOUT:
        seed = tl.load(seeds)
    k = load_tile(K, batch, head_kv, own, sizes.keys, C.BLOCK_N, C)
    v = load_tile(V, batch, head_kv, own, sizes.keys, C.BLOCK_N, C)
    dk = tl.zeros([C.BLOCK_N, C.PADDED], tl.float32)
    dv = dk
    group = heads // heads_kv
    stride = tl.cdiv(queries, ALIGNED) * ALIGNED
    first_head = unit * group
    row_terms += 3 * first_head.to(tl.int64) * stride
    FROM: tl.constexpr = C.CAUSAL and not (C.WINDOW or C.RANGES or C.ONE_LOOP)  # masks of a head's first tiles alone
    masked = count if C.CAUSAL or C.WINDOW or C.RANGES else 0
    if FROM:
        full, _ = queries_seeing(own + C.BLOCK_N - 1, batch, ranges, sizes, C)
        masked = tl.minimum(tl.cdiv(full - start, C.BLOCK_M), count)
    if C.CAUSAL or C.WINDOW or C.RANGES:
        dk, dv = _add_to_keys(
            dk, dv, k, v, Q, GRAD, row_terms, batch, head_kv * group, first_head, stride, own, first,
            last, start, masked, score, seed, sizes, MASKED=True, C=C,
        )  # fmt: skip
    if FROM or not (C.CAUSAL or C.WINDOW or C.RANGES):
        dk, dv = _add_to_keys(
            dk, dv, k, v, Q, GRAD, row_terms, batch, head_kv * group, first_head, stride, own, first,
            last, start + masked * C.BLOCK_M, count - masked, score, seed, sizes, MASKED=False, C=C,
        )  # fmt: skip
    if C.OMIT != "values":
        if C.DROPOUT:
            dv = dv * score.rescale
        store_tile(DV, dv, batch, head_kv, own, keys, C.BLOCK_N, C)
    if C.OMIT != "keys":
        dk = dk * factor
        store_raw_gradient(dk, X, DX, norm, dgain, dbias, rotary, batch, head_kv, own, keys, C.BLOCK_N, NORM, C)
