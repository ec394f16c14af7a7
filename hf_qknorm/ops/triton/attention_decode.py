"""Attention of a few queries over many keys, as in cached generation: programs share a head's keys, then add up.

The query heads of a group are rows of one tile, so that K and V are read once for all of them.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_qknorm.ops.triton.attention_forward import NEVER, attend, from_sink
from hf_qknorm.ops.triton.launch import Tile, dense, descriptor, launch, loops, padded, precision, reach, tile, units
from hf_qknorm.ops.triton.score_math import keys_seen
from hf_qknorm.ops.types import Options, Visible, laid_out

ROWS = 64  # queries of a group's heads, at most
SHARE = 256  # keys for a program, at least: with fewer it takes longer to start than to read
PROCESSORS = 132  # of a Hopper, where there is no GPU to ask

# By the size of a number in bytes, and head_dim rounded up to a power of two; `queries` are rows at least. In half
# precision two programs fit a processor, with 64 KiB on their way to it: more than memory's latency needs.
DECODE: dict[tuple[int, int], Tile] = {
    (2, 16): Tile(16, 64, 4, 3),
    (2, 32): Tile(16, 128, 4, 3),
    (2, 64): Tile(16, 128, 4, 3),
    (2, 128): Tile(16, 64, 4, 3),
    (2, 256): Tile(16, 32, 4, 3),
    (4, 16): Tile(16, 64, 8, 3),
    (4, 32): Tile(16, 32, 8, 3),
    (4, 64): Tile(16, 32, 8, 3),
    (4, 128): Tile(16, 16, 8, 3),
    (4, 256): Tile(16, 16, 8, 2),
}


@triton.jit(do_not_specialize=["queries", "keys", "splits"])  # keys grow with each step: one kernel for all
def split_kernel(
    q, K, V, partial, sums, ranges,
    stride_b, stride_h, stride_t, stride_d, unit, cap, group, heads_kv, queries, keys, window, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RANGES: tl.constexpr,
    TANH: tl.constexpr, ONLINE: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of weights·v `[splits, B, H, T, P]`, of weights 2^(logit − peak), and the peaks `[2, splits, B, H, T]`.

    A split is a part of what any of the queries sees, not of all keys: a static cache is empty for the most part. Where
    a query sees nothing of its split the first sum is not written.
    """
    split = tl.program_id(0) % splits
    number = tl.program_id(0) // splits
    batch = number // heads_kv
    head_kv = number % heads_kv
    rows = tl.arange(0, BLOCK_M)
    real = rows < group * queries
    head = head_kv * group + rows // queries
    query = rows % queries
    first, last = keys_seen(query, ranges, batch, queries, keys, window, CAUSAL, WINDOW, RANGES)
    lowest, _ = keys_seen(batch * 0, ranges, batch, queries, keys, window, CAUSAL, WINDOW, RANGES)
    _, highest = keys_seen(batch * 0 + queries - 1, ranges, batch, queries, keys, window, CAUSAL, WINDOW, RANGES)
    lowest = lowest // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(highest - lowest, BLOCK_N), splits) * BLOCK_N
    start = lowest + split * share
    stop = tl.minimum(start + share, highest)

    at = batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + query * stride_t
    cols = tl.arange(0, PADDED)
    q = tl.load(q + at[:, None] + cols[None, :] * stride_d, real[:, None] & (cols < HEAD_DIM)[None, :], 0.0)
    acc = tl.zeros([BLOCK_M, PADDED], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = total
    if ONLINE:
        peak = total + NEVER
    acc, total, peak, _, _ = attend(
        acc, total, peak, total, total,
        q, K, V, batch, head_kv, number, rows, first, last, start, stop, unit, cap, 0, 0.0,
        BLOCK_N, PADDED, True, TANH, ONLINE, SCALED, False, False, PRECISION,
    )  # fmt: skip
    count = tl.num_programs(0).to(tl.int64) // splits * group * queries
    at = split * count + number * group * queries + rows
    tl.store(sums + at, total, real)
    tl.store(sums + splits * count + at, peak, real)
    tl.store(partial + at[:, None] * PADDED + cols[None, :], acc, (real & (total != 0))[:, None])


@triton.jit(do_not_specialize=["queries", "splits"])
def combine_kernel(
    partial, sums, sinks, out, normaliser, heads, queries, splits,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Output `[B, T, H, D]` and normaliser `[B, H, T, 2]` of the splits' sums; the sinks are added here, once."""
    count = tl.num_programs(0).to(tl.int64)
    number = tl.program_id(0)
    head = number // queries % heads
    cols = tl.arange(0, PADDED)
    acc = tl.zeros([PADDED], tl.float32)
    total = 0.0
    peak = NEVER
    if SINKS:
        peak, total = from_sink(sinks, head)
    for s in tl.range(0, splits, BLOCK):
        split = s + tl.arange(0, BLOCK)
        at = split * count + number
        totals = tl.load(sums + at, split < splits, 0.0)
        peaks = tl.load(sums + splits * count + at, split < splits, NEVER)
        parts = tl.load(partial + at[:, None] * PADDED + cols[None, :], (totals != 0)[:, None], 0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        weights = tl.exp2(peaks - higher)
        shrink = tl.exp2(peak - higher)
        acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
        total = total * shrink + tl.sum(totals * weights, 0)
        peak = higher
    empty = total == 0  # not so for NaN, which goes on
    tl.store(normaliser + 2 * number.to(tl.int64), peak)
    tl.store(normaliser + 2 * number.to(tl.int64) + 1, total)
    row = (number // (heads * queries) * queries + number % queries).to(tl.int64) * heads + head
    value = acc * tl.where(empty, 0.0, 1.0 / total)
    tl.store(out + row * HEAD_DIM + cols, value.to(out.dtype.element_ty), cols < HEAD_DIM)


def suits(q: Tensor, k: Tensor) -> bool:
    """Whether `forward` is the faster way for q `[B, H, T, D]` and k `[B, Hk, S, D]`: few rows, many keys."""
    return q.shape[1] // k.shape[1] * q.shape[2] <= ROWS and k.shape[2] >= SHARE


def forward(q: Tensor, k: Tensor, v: Tensor, visible: Visible, options: Options) -> tuple[Tensor, Tensor]:
    """Output and normaliser as `flash.forward` has them, of heads that nothing is to be done to; no dropout."""
    return _combine(*_split(q, dense(k), dense(v), visible, options), q, visible.sinks)


def _split(q: Tensor, k: Tensor, v: Tensor, visible: Visible, options: Options) -> tuple[Tensor, Tensor]:
    """What `split_kernel` makes of each split: the sums of weights·v, those of weights with their peaks."""
    (b, h, t, d), hk, s = q.shape, k.shape[1], k.shape[2]
    shape, columns, parts = tile(DECODE, q), padded(d), splits(q, k)
    unit, cap, scaled = units(options.scale, options.softcap)
    (loop,) = loops(q.dtype, options.softcap, bounded=False, sinks=False)  # sinks only meet the sums
    partial = torch.empty(parts, b, h, t, columns, dtype=torch.float32, device=q.device)
    sums = torch.empty(2, parts, b, h, t, dtype=torch.float32, device=q.device)
    launch(
        split_kernel,
        (parts * b * hk,),
        q.device,
        q,
        descriptor(k, shape.keys),
        descriptor(v, shape.keys),
        partial,
        sums,
        visible.ranges,
        *q.stride(),
        unit,
        cap,
        h // hk,
        hk,
        t,
        s,
        reach(options.window, t, s),
        parts,
        BLOCK_M=max(shape.queries, triton.next_power_of_2(h // hk * t)),
        BLOCK_N=shape.keys,
        PADDED=columns,
        HEAD_DIM=d,
        CAUSAL=options.causal,
        WINDOW=options.window is not None,
        RANGES=visible.ranges is not None,
        TANH=loop.tanh,
        ONLINE=loop.online,
        SCALED=scaled,
        PRECISION=precision(q.dtype),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return partial, sums


def _combine(partial: Tensor, sums: Tensor, q: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and normaliser, of all splits' sums."""
    b, h, t, d = q.shape
    out = laid_out(q)
    normaliser = torch.empty(b, h, t, 2, dtype=torch.float32, device=q.device)
    launch(
        combine_kernel,
        (b * h * t,),
        q.device,
        partial,
        sums,
        sinks,
        out,
        normaliser,
        h,
        t,
        len(partial),
        BLOCK=16,
        PADDED=padded(d),
        HEAD_DIM=d,
        SINKS=sinks is not None,
        num_warps=4,
    )
    return out, normaliser


def splits(q: Tensor, k: Tensor) -> int:
    """How many programs share a head's keys: enough for two on each processor, but `SHARE` keys for each of them."""
    programs, keys = k.shape[0] * k.shape[1], k.shape[2]
    return max(1, min(-(-2 * _processors(q.device) // programs), keys // SHARE))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS
