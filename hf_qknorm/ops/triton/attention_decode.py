"""Attention of few queries over many keys, as in cached generation: several programs split the keys of a head.

The queries of all heads of a group are rows of one tile, so that K and V are read once for all of them. A program
writes the sums over its split of the keys. A second launch combines the sums of all splits in their order, so that
each run gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_qknorm.ops.triton import schedule
from hf_qknorm.ops.triton.architectures import LEAST_KEYS, MOST_QUERIES, MOST_ROWS, Tile
from hf_qknorm.ops.triton.arguments import HeadArguments, Sizes
from hf_qknorm.ops.triton.attention_forward import LOWEST, Sums, add_keys, from_sink
from hf_qknorm.ops.triton.launch import launch, padded, pointers, reach, tiles
from hf_qknorm.ops.triton.norm_rope import PreparedHeads
from hf_qknorm.ops.triton.score_math import QueryBlock, QueryRows, keys_seen
from hf_qknorm.ops.types import Options, Visible, laid_out

COMBINED_ROWS = 4  # of each program of the second launch
COMBINED = tl.constexpr(8192)  # numbers of the sums that a program reads at once


@triton.jit
def _finish(
    acc, total, peak, out, normaliser, sinks, batch, head, query, real, heads, queries,
    PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Add the sinks to the sums of rows `[M]`; store output `[B, T, H, D]` and normaliser `[B, H, T, 2]`."""
    if SINKS:
        sink, weight = from_sink(sinks, head)
        higher = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - higher)
        acc = acc * shrink[:, None]
        total = total * shrink + weight * tl.exp2(sink - higher)
        peak = higher
    at = normaliser + 2 * ((batch.to(tl.int64) * heads + head) * queries + query)
    tl.store(at, peak, real)
    tl.store(at + 1, total, real)
    empty = total == 0  # false for NaN, which reaches the output
    value = acc * tl.where(empty, 0.0, 1.0 / total)[:, None]
    cols = tl.arange(0, PADDED)
    at = ((batch.to(tl.int64) * queries + query) * heads + head) * HEAD_DIM
    tl.store(
        out + at[:, None] + cols[None, :], value.to(out.dtype.element_ty), real[:, None] & (cols < HEAD_DIM)[None, :]
    )


@triton.jit(do_not_specialize=["queries", "keys", "window", "splits"])  # keys grow with each step: one kernel for all
def split_kernel(
    q, K, V, out, normaliser, partial, ranges, sinks, score, group, heads_kv, queries, keys, window, splits,
    SINKS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Output and normaliser, as `_finish` stores them; of several splits the sums alone, for `combine_kernel`.

    The rows of a group `[T·G]` are its first query of each head, then its second one. `partial` has room for the sums
    of weights·v `[splits, B·Hk, T·G, P]`, then sums of weights and peaks `[2, splits, B·Hk, T·G]`. A split is a part
    of the keys that some query of the block sees, not of all keys: most of a static cache is empty. The first sum is
    not written for a query that sees nothing of its split.
    """
    length = group * queries
    blocks = tl.cdiv(length, C.BLOCK_M)
    number = tl.program_id(0) // (blocks * splits)
    split = tl.program_id(0) // blocks % splits
    start = tl.program_id(0) % blocks * C.BLOCK_M
    batch = number // heads_kv
    head_kv = number % heads_kv
    heads = group * heads_kv
    sizes = Sizes(heads, heads_kv, queries, keys, window)
    rows = start + tl.arange(0, C.BLOCK_M)
    real = rows < length
    head = head_kv * group + rows % group
    query = rows // group
    first, last = keys_seen(query, batch, ranges, sizes, C)
    lowest, _ = keys_seen(start // group, batch, ranges, sizes, C)
    _, highest = keys_seen((start + C.BLOCK_M - 1) // group, batch, ranges, sizes, C)
    lowest = lowest // C.BLOCK_N * C.BLOCK_N
    span = tl.cdiv(tl.cdiv(highest - lowest, C.BLOCK_N), splits) * C.BLOCK_N
    low = lowest + split * span
    high = tl.minimum(low + span, highest)

    at = batch.to(tl.int64) * q.batch + head.to(tl.int64) * q.head + query.to(tl.int64) * q.row
    cols = tl.arange(0, C.PADDED)
    values = tl.load(q.data + at[:, None] + cols[None, :], real[:, None] & (cols < C.HEAD_DIM)[None, :], 0.0)
    zeros = tl.zeros([C.BLOCK_M], tl.float32)
    peak = zeros
    if C.ONLINE:
        peak = zeros + LOWEST
    sums = Sums(tl.zeros([C.BLOCK_M, C.PADDED], tl.float32), zeros, peak, zeros, zeros)
    block = QueryBlock(0, number, batch, head_kv * group, head_kv)
    seen = QueryRows(first, last)
    sums = add_keys(sums, values, K, V, block, seen, low, high, score, 0, sizes, MASKED=True, C=C)
    acc, total, peak, _, _ = sums
    if splits == 1:
        _finish(
            acc, total, peak, out, normaliser, sinks, batch, head, query, real, heads, queries,
            C.PADDED, C.HEAD_DIM, SINKS,
        )  # fmt: skip
    else:
        count = tl.num_programs(0).to(tl.int64) // (blocks * splits) * length
        totals = partial + splits * count * C.PADDED
        at = split * count + number.to(tl.int64) * length + rows
        tl.store(totals + at, total, real)
        tl.store(totals + splits * count + at, peak, real)
        tl.store(partial + at[:, None] * C.PADDED + cols[None, :], acc, (real & (total != 0))[:, None])


@triton.jit(do_not_specialize=["queries", "splits"])
def combine_kernel(
    partial, out, normaliser, sinks, heads_kv, group, queries, splits,
    ROWS: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Output and normaliser from the sums of the splits, ROWS rows of a group for each program."""
    PARTS: tl.constexpr = COMBINED // (ROWS * PADDED) if ROWS * PADDED < COMBINED else 1
    length = group * queries
    blocks = tl.cdiv(length, ROWS)
    count = (tl.num_programs(0) // blocks).to(tl.int64) * length
    number = tl.program_id(0) // blocks
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    totals = partial + splits * count * PADDED
    cols = tl.arange(0, PADDED)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = total + LOWEST
    for first in tl.range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        at = part.to(tl.int64)[:, None] * count + (number.to(tl.int64) * length + rows)[None, :]
        real = (part < splits)[:, None] & (rows < length)[None, :]
        part_totals = tl.load(totals + at, real, 0.0)
        peaks = tl.load(totals + splits * count + at, real, LOWEST)
        entries = at[:, :, None] * PADDED + cols[None, None, :]
        parts = tl.load(partial + entries, (part_totals != 0)[:, :, None], 0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        weights = tl.exp2(peaks - higher[None, :])
        shrink = tl.exp2(peak - higher)
        acc = acc * shrink[:, None] + tl.sum(parts * weights[:, :, None], 0)
        total = total * shrink + tl.sum(part_totals * weights, 0)
        peak = higher
    _finish(
        acc, total, peak, out, normaliser, sinks, number // heads_kv, number % heads_kv * group + rows % group,
        rows // group, rows < length, heads_kv * group, queries, PADDED, HEAD_DIM, SINKS,
    )  # fmt: skip


def suits(q: Tensor, k: Tensor) -> bool:
    """Whether this kernel is faster than one program a head and block of queries: q `[B, H, T, D]`, k `[B, Hk, S, D]`.

    It is for few queries, where it reads K and V once for a group, and where those programs leave half of the
    processors idle and the keys can be split.
    """
    (b, h, t, _), rows = q.shape, rows_of(q, k)
    if rows <= MOST_ROWS:
        return True
    programs = b * h * -(-t // tiles(q).forward.queries)
    return rows < MOST_QUERIES and 2 * programs <= schedule.gpu(q.device).processors and splits(q, k) > 1


def rows_of(q: Tensor, k: Tensor) -> int:
    """The number of queries of a group's heads."""
    return q.shape[1] // k.shape[1] * q.shape[2]


def splits(q: Tensor, k: Tensor) -> int:
    """The number of programs for a head's keys: two for each processor, but `LEAST_KEYS` keys for each of them."""
    programs = k.shape[0] * k.shape[1] * -(-rows_of(q, k) // MOST_ROWS)
    return max(1, min(-(-2 * schedule.gpu(q.device).processors // programs), k.shape[2] // LEAST_KEYS))


def tile(q: Tensor, k: Tensor) -> Tile:
    """The tile of a program, whose queries are the rows of a group."""
    least = tiles(q).decode
    rows = max(least.queries, triton.next_power_of_2(min(rows_of(q, k), MOST_ROWS)))
    return least._replace(queries=rows, warps=8 if rows == MOST_ROWS else least.warps)  # else the sums would spill


def forward(
    prepared: PreparedHeads, visible: Visible, options: Options, tile: Tile, loop: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Output and normaliser as in `attention.Result`, for heads without norm and RoPE, and without dropout."""
    q, k, v, *_ = prepared
    (b, h, t, d), hk, s = q.shape, k.shape[1], k.shape[2]
    columns, parts = padded(d), splits(q, k)
    normaliser = torch.empty(b, h, t, 2, dtype=torch.float32, device=q.device)
    partial = normaliser  # of one split nothing is written there; without a tensor it would be another kernel
    if parts > 1:
        partial = torch.empty(parts * b * h * t * (columns + 2), dtype=torch.float32, device=q.device)
    out = laid_out(q)
    shared: dict[str, Any] = {
        "partial": partial,
        "out": out,
        "normaliser": normaliser,
        "sinks": visible.sinks,
        "heads_kv": hk,
        "group": h // hk,
        "queries": t,
        "splits": parts,
        "SINKS": visible.sinks is not None,
    }
    launch(
        split_kernel,
        (parts * b * hk * -(-rows_of(q, k) // tile.queries),),
        q.device,
        q=HeadArguments.of(q),
        K=pointers(k),
        V=pointers(v),
        ranges=visible.ranges,
        keys=s,
        window=reach(options.window, t, s),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **loop,
        **shared,
    )
    if parts > 1:
        programs = b * hk * -(-rows_of(q, k) // COMBINED_ROWS)
        launch(
            combine_kernel, (programs,), q.device, ROWS=COMBINED_ROWS, PADDED=columns, HEAD_DIM=d, num_warps=4, **shared
        )
    return out, normaliser
