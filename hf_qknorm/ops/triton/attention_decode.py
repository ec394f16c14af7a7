"""Attention of a few queries over many keys, as in cached generation: several programs split a head's keys.

The query heads of a group are rows of one tile, so that K and V are read once for all of them. A second kernel combines
the splits' sums.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_qknorm.ops.triton.arguments import Constants, HeadArguments, ScoreArguments, Sizes
from hf_qknorm.ops.triton.attention_forward import LOWEST, Sums, attend, from_sink
from hf_qknorm.ops.triton.launch import (
    as_tiles,
    dense,
    forward_variants,
    launch,
    padded,
    precision,
    reach,
    tiles,
    units,
    uses_pointers,
)
from hf_qknorm.ops.triton.score_math import QueryBlock, QueryRows, keys_seen
from hf_qknorm.ops.types import Options, Visible, laid_out

MOST_ROWS = 64  # queries of a group's heads
LEAST_KEYS = 256  # of a program: with fewer it takes longer to start than to read
PROCESSORS = 132  # of a Hopper, where there is no GPU


@triton.jit(do_not_specialize=["queries", "keys", "window", "splits"])  # keys grow with each step: one kernel for all
def split_kernel(
    q, K, V, partial, totals, ranges, score, group, heads_kv, queries, keys, window, splits, C: tl.constexpr
):
    """Sums of weights·v `[splits, B, H, T, P]`; sums of weights 2^(logit − peak), and peaks `[2, splits, B, H, T]`.

    A split is a part of the keys that some query sees, not of all keys: most of a static cache is empty. The first sum
    is not written for a query that sees nothing of its split.
    """
    split = tl.program_id(0) % splits
    number = tl.program_id(0) // splits
    batch = number // heads_kv
    head_kv = number % heads_kv
    sizes = Sizes(group * heads_kv, heads_kv, queries, keys, window)
    rows = tl.arange(0, C.BLOCK_M)
    real = rows < group * queries
    head = head_kv * group + rows // queries
    query = rows % queries
    first, last = keys_seen(query, batch, ranges, sizes, C)
    lowest, _ = keys_seen(batch * 0, batch, ranges, sizes, C)
    _, highest = keys_seen(batch * 0 + queries - 1, batch, ranges, sizes, C)
    lowest = lowest // C.BLOCK_N * C.BLOCK_N
    length = tl.cdiv(tl.cdiv(highest - lowest, C.BLOCK_N), splits) * C.BLOCK_N
    start = lowest + split * length
    stop = tl.minimum(start + length, highest)

    at = batch.to(tl.int64) * q.batch + head.to(tl.int64) * q.head + query * q.row
    cols = tl.arange(0, C.PADDED)
    values = tl.load(q.data + at[:, None] + cols[None, :], real[:, None] & (cols < C.HEAD_DIM)[None, :], 0.0)
    zeros = tl.zeros([C.BLOCK_M], tl.float32)
    peak = zeros
    if C.ONLINE:
        peak = zeros + LOWEST
    sums = Sums(tl.zeros([C.BLOCK_M, C.PADDED], tl.float32), zeros, peak, zeros, zeros)
    block = QueryBlock(0, number, batch, head_kv * group, head_kv)
    seen = QueryRows(rows, first, last)
    sums = attend(sums, values, K, V, block, seen, start, stop, score, 0, sizes, MASKED=True, C=C)
    count = tl.num_programs(0).to(tl.int64) // splits * group * queries
    at = split * count + number * group * queries + rows
    tl.store(totals + at, sums.total, real)
    tl.store(totals + splits * count + at, sums.peak, real)
    tl.store(partial + at[:, None] * C.PADDED + cols[None, :], sums.acc, (real & (sums.total != 0))[:, None])


@triton.jit(do_not_specialize=["heads", "queries", "splits"])
def combine_kernel(
    partial, totals, sinks, out, normaliser, heads, queries, splits,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Output `[B, T, H, D]` and normaliser `[B, H, T, 2]` from the splits' sums, and the sinks."""
    count = tl.num_programs(0).to(tl.int64)
    number = tl.program_id(0)
    head = number // queries % heads
    cols = tl.arange(0, PADDED)
    acc = tl.zeros([PADDED], tl.float32)
    total = 0.0
    peak = LOWEST
    if SINKS:
        peak, total = from_sink(sinks, head)
    for s in tl.range(0, splits, BLOCK):
        split = s + tl.arange(0, BLOCK)
        at = split * count + number
        part_totals = tl.load(totals + at, split < splits, 0.0)
        peaks = tl.load(totals + splits * count + at, split < splits, LOWEST)
        parts = tl.load(partial + at[:, None] * PADDED + cols[None, :], (part_totals != 0)[:, None], 0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        weights = tl.exp2(peaks - higher)
        shrink = tl.exp2(peak - higher)
        acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
        total = total * shrink + tl.sum(part_totals * weights, 0)
        peak = higher
    empty = total == 0  # false for NaN, which reaches the output
    tl.store(normaliser + 2 * number.to(tl.int64), peak)
    tl.store(normaliser + 2 * number.to(tl.int64) + 1, total)
    row = (number // (heads * queries) * queries + number % queries).to(tl.int64) * heads + head
    value = acc * tl.where(empty, 0.0, 1.0 / total)
    tl.store(out + row * HEAD_DIM + cols, value.to(out.dtype.element_ty), cols < HEAD_DIM)


def suits(q: Tensor, k: Tensor) -> bool:
    """Whether splits are faster than one program a head: q `[B, H, T, D]` has few rows, k `[B, Hk, S, D]` many keys."""
    return q.shape[1] // k.shape[1] * q.shape[2] <= MOST_ROWS and k.shape[2] >= LEAST_KEYS


def forward(q: Tensor, k: Tensor, v: Tensor, visible: Visible, options: Options) -> tuple[Tensor, Tensor]:
    """Output and normaliser as in `attention.Result`, for heads without norm and RoPE, and without dropout."""
    (b, h, t, d), hk, s = q.shape, k.shape[1], k.shape[2]
    shape, columns, parts = tiles(q).decode, padded(d), splits(q, k)
    unit, cap, scaled = units(options.scale, options.softcap)
    # the second kernel adds the sinks
    (variant,) = forward_variants(q.dtype, options.softcap, bounded=False, sinks=False)
    partial = torch.empty(parts, b, h, t, columns, dtype=torch.float32, device=q.device)
    totals = torch.empty(2, parts, b, h, t, dtype=torch.float32, device=q.device)
    launch(
        split_kernel,
        (parts * b * hk,),
        q.device,
        q=HeadArguments.of(q),
        K=as_tiles(dense(k), shape.keys),
        V=as_tiles(dense(v), shape.keys),
        partial=partial,
        totals=totals,
        ranges=visible.ranges,
        score=ScoreArguments(unit, cap),
        group=h // hk,
        heads_kv=hk,
        queries=t,
        keys=s,
        window=reach(options.window, t, s),
        splits=parts,
        C=Constants(
            max(shape.queries, triton.next_power_of_2(h // hk * t)),
            shape.keys,
            columns,
            d,
            POINTERS=uses_pointers(q.device),
            CAUSAL=options.causal,
            WINDOW=options.window is not None,
            RANGES=visible.ranges is not None,
            TANH=variant.tanh,
            ONLINE=variant.online,
            SCALED=scaled,
            PRECISION=precision(q.dtype),
        ),
        **shape.launch_options,
    )
    return _combine(partial, totals, visible.sinks, q)


def _combine(partial: Tensor, totals: Tensor, sinks: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """Output and normaliser from the splits' sums, for queries q."""
    b, h, t, d = q.shape
    out = laid_out(q)
    normaliser = torch.empty(b, h, t, 2, dtype=torch.float32, device=q.device)
    launch(
        combine_kernel,
        (b * h * t,),
        q.device,
        partial=partial,
        totals=totals,
        sinks=sinks,
        out=out,
        normaliser=normaliser,
        heads=h,
        queries=t,
        splits=partial.shape[0],
        BLOCK=16,
        PADDED=partial.shape[-1],
        HEAD_DIM=d,
        SINKS=sinks is not None,
        num_warps=4,
    )
    return out, normaliser


def splits(q: Tensor, k: Tensor) -> int:
    """The number of programs for a head's keys: two for each processor, but `LEAST_KEYS` keys for each of them."""
    programs, keys = k.shape[0] * k.shape[1], k.shape[2]
    return max(1, min(-(-2 * _processors(q.device) // programs), keys // LEAST_KEYS))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS
