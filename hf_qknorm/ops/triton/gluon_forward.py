"""Attention, forward, for Hopper: one warp loads tiles, two warpgroups of 64 queries each attend, in Gluon.

Mathematics and arguments are as in `attention_forward`. The products q·k of one tile of keys run while those
of the weights and values of the tile before do, and become weights in that time. Tiles are taken from the last to the
first, so that those with a mask come first.

Keys and values are rings of STAGES tiles in shared memory. One barrier says that a tile is full, one that both
warpgroups have read it; each barrier's phase flips once in a round of the ring.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hf_qknorm.ops.triton.arguments import Sizes
from hf_qknorm.ops.triton.attention_forward import LOWEST
from hf_qknorm.ops.triton.score_math import capped, keys_seen, query_block, serves

# Triton 3.6 has other names for the copies
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def place(n, STAGES: gl.constexpr):
    """Where the n-th tile lies in its ring, and the phase of its barriers."""
    return n % STAGES, n // STAGES & 1


@gluon.jit
def weigh(x, total, peak, last, start, score, MASKED: gl.constexpr, C: gl.constexpr):
    """Weights of the scores x `[M, N]` of the keys from `start` on, new total and peak, and the factor for older sums.

    A query sees the keys before its `last`.
    """
    if C.SCALED:
        x = x * score.unit
    x = capped(x, score.cap, C)
    if MASKED:
        cols = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
        x = gl.where(cols[None, :] < (last - start)[:, None], x, float("-inf"))
    shrink = peak
    if C.ONLINE:
        higher = gl.maximum(peak, gl.max(x, 1) * score.cap)
        x = x * score.cap - higher[:, None]
        shrink = gl.exp2(peak - higher)
        total = total * shrink
        peak = higher
    p = gl.exp2(x)
    return p, total + gl.sum(p, 1), peak, shrink


@gluon.jit
def add_tiles(
    acc, p, total, peak, begin, end, q, ring, turns, last, tiles, score,
    STAGES: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Add tiles of keys to the sums, from the `begin`-th to the `end`-th; p holds the weights of the one before.

    `turns` are the barriers on which this and the other warpgroup wait for their turn to start products: while the
    products of one run, the other computes weights. The weights are carried as integers: bf16 numbers Triton 3.6 would
    unpack and pack again, one by one.
    """
    own, other = turns
    k_tiles, v_tiles, k_full, k_read, v_full, v_read = ring
    SCORES: gl.constexpr = total.type.layout.parent
    SUMS: gl.constexpr = acc.type.layout
    for n in range(begin, end):
        slot, phase = place(n, STAGES)
        v_slot, v_phase = place(n - 1, STAGES)
        mbarrier.wait(own, (n - 1) & 1)
        k = k_tiles.index(slot).reshape([C.BLOCK_N, C.PADDED]).permute((1, 0))
        x = warpgroup_mma(q, k, gl.zeros([64, C.BLOCK_N], gl.float32, SCORES), use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_slot), v_phase)
        v = v_tiles.index(v_slot).reshape([C.BLOCK_N, C.PADDED])
        sums = warpgroup_mma(p.to(q.dtype, bitcast=True), v, acc, is_async=True)
        mbarrier.arrive(other, count=1)
        x = warpgroup_mma_wait(1, deps=(x,))
        mbarrier.arrive(k_read.index(slot), count=1)
        start = (tiles - 1 - n) * C.BLOCK_N
        weights, total, peak, shrink = weigh(x, total, peak, last, start, score, MASKED, C)
        # a wait is a loop, over which ptxas does not move the weights behind the products that run meanwhile
        next_slot, next_phase = place(gl.minimum(n + 1, tiles - 1), STAGES)
        mbarrier.wait(k_full.index(next_slot), next_phase)
        # the weights wait too: until the products are done, they read the registers of p
        acc, weights = warpgroup_mma_wait(0, deps=(sums, weights))
        mbarrier.arrive(v_read.index(v_slot), count=1)
        if C.ONLINE:
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        p = gl.convert_layout(weights.to(q.dtype), p.type.layout).to(gl.int16, bitcast=True)
    return acc, p, total, peak


@gluon.jit
def attend(q, ring, turns, rows, start, tiles, score, sizes, batch, STAGES: gl.constexpr, C: gl.constexpr):
    """Sums over all tiles of keys, but for the values of the last one: acc `[64, P]`, p `[64, N]`, total, peak."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.PADDED, 16])
    k_tiles, v_tiles, k_full, k_read, v_full, v_read = ring
    _, last = keys_seen(rows, batch, None, sizes, C)
    _, least = keys_seen(start, batch, None, sizes, C)
    masked = gl.maximum(tiles - gl.maximum(least, 0) // C.BLOCK_N, 1)  # tiles that some query does not see whole
    acc = gl.zeros([64, C.PADDED], gl.float32, SUMS)
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    peak = total
    if C.ONLINE:
        peak = total + LOWEST
    mbarrier.wait(k_full.index(0), 0)
    k = k_tiles.index(0).reshape([C.BLOCK_N, C.PADDED]).permute((1, 0))
    x = warpgroup_mma(q, k, gl.zeros([64, C.BLOCK_N], gl.float32, SCORES), use_acc=False, is_async=True)
    x = warpgroup_mma_wait(0, deps=(x,))
    mbarrier.arrive(k_read.index(0), count=1)
    weights, total, peak, shrink = weigh(
        x, total, peak, last, (tiles - 1) * C.BLOCK_N, score, MASKED=True, C=C
    )  # fmt: skip
    p = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, SUMS, 2)).to(gl.int16, bitcast=True)
    slot, phase = place(gl.minimum(1, tiles - 1), STAGES)
    mbarrier.wait(k_full.index(slot), phase)
    acc, p, total, peak = add_tiles(
        acc, p, total, peak, 1, masked, q, ring, turns, last, tiles, score, STAGES, MASKED=True, C=C
    )  # fmt: skip
    return add_tiles(
        acc, p, total, peak, masked, tiles, q, ring, turns, last, tiles, score, STAGES, MASKED=False, C=C
    )  # fmt: skip


@gluon.jit
def consume(
    q_tile, q_full, ring, turns, OUT, normaliser, batch, head, number, start, tiles, within, score, sizes,
    FIRST: gl.constexpr, STAGES: gl.constexpr, C: gl.constexpr, BEYOND: gl.constexpr,
):  # fmt: skip
    """The work of a warpgroup: the 64 queries from `start` on, over all tiles of keys; FIRST takes the first turn."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.PADDED, 16])
    k_tiles, v_tiles, k_full, k_read, v_full, v_read = ring
    rows = start + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    q = q_tile.reshape([64, C.PADDED])
    if not FIRST:
        mbarrier.arrive(turns[1], count=1)
    mbarrier.wait(q_full, 0)
    if BEYOND is None or within:
        acc, p, total, peak = attend(q, ring, turns, rows, start, tiles, score, sizes, batch, STAGES, C)
    else:
        acc, p, total, peak = attend(q, ring, turns, rows, start, tiles, score, sizes, batch, STAGES, BEYOND)
    slot, phase = place(tiles - 1, STAGES)
    mbarrier.wait(v_full.index(slot), phase)
    v = v_tiles.index(slot).reshape([C.BLOCK_N, C.PADDED])
    sums = warpgroup_mma(p.to(q.dtype, bitcast=True), v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(sums,))
    empty = total == 0  # false for NaN, which reaches the output
    inverse_total = gl.where(empty, 0.0, 1.0 / total)
    at = normaliser + 2 * (number.to(gl.int64) * sizes.queries + rows)
    gl.store(at, peak, mask=rows < sizes.queries)
    gl.store(at + 1, total, mask=rows < sizes.queries)
    out = acc * gl.convert_layout(inverse_total, gl.SliceLayout(1, SUMS))[:, None]
    q.store(out.to(q.dtype))  # the queries have been read
    fence_async_shared()
    store_tile(OUT, [batch, head, start, 0], q_tile)
    tma.store_wait(0)


@gluon.jit
def produce(Q, K, V, q_tiles, q_full, ring, batch, head, head_kv, start, tiles, STAGES: gl.constexpr, C: gl.constexpr):
    """The work of the loading warp: the queries of both warpgroups, then all tiles of keys and values."""
    k_tiles, v_tiles, k_full, k_read, v_full, v_read = ring
    mbarrier.expect(q_full, 2 * Q.block_type.nbytes)
    load_tile(Q, [batch, head, start, 0], q_full, q_tiles.index(0))
    load_tile(Q, [batch, head, start + 64, 0], q_full, q_tiles.index(1))
    for n in range(tiles):
        slot, phase = place(n, STAGES)
        at = [batch, head_kv, (tiles - 1 - n) * C.BLOCK_N, 0]
        mbarrier.wait(k_read.index(slot), phase ^ 1)  # the first round waits for nothing
        mbarrier.expect(k_full.index(slot), K.block_type.nbytes)
        load_tile(K, at, k_full.index(slot), k_tiles.index(slot))
        mbarrier.wait(v_read.index(slot), phase ^ 1)
        mbarrier.expect(v_full.index(slot), V.block_type.nbytes)
        load_tile(V, at, v_full.index(slot), v_tiles.index(slot))


@gluon.jit(do_not_specialize=Sizes._fields)
def gluon_forward_kernel(
    Q, K, V, OUT, normaliser, bound, score, heads, heads_kv, queries, keys, window, section,
    STAGES: gl.constexpr, C: gl.constexpr, BEYOND: gl.constexpr = None,
):  # fmt: skip
    """As `forward_kernel`, without windows, ranges, sinks, dropout and statistics; BLOCK_M is 128."""
    sizes = Sizes(heads, heads_kv, queries, keys, window, section)
    start, number, batch, head, head_kv = query_block(sizes, C)
    within = serves(bound, batch * sizes.heads_kv + head_kv, score.limit, C.WHEN)
    _, stop = keys_seen(start + C.BLOCK_M - 1, batch, None, sizes, C)
    tiles = gl.maximum(gl.cdiv(stop, C.BLOCK_N), 1)  # one for queries without keys, all of it masked
    q_tiles = gl.allocate_shared_memory(Q.dtype, [2, 1, 1, 64, C.PADDED], Q.layout)
    k_tiles = gl.allocate_shared_memory(K.dtype, [STAGES, 1, 1, C.BLOCK_N, C.PADDED], K.layout)
    v_tiles = gl.allocate_shared_memory(V.dtype, [STAGES, 1, 1, C.BLOCK_N, C.PADDED], V.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_read.index(i), count=2)
        mbarrier.init(v_read.index(i), count=2)
    fence_async_shared()
    ring = (k_tiles, v_tiles, k_full, k_read, v_full, v_read)
    gl.warp_specialize(
        [
            (consume, (
                q_tiles.index(0), q_full, ring, (turns.index(0), turns.index(1)), OUT, normaliser, batch, head, number,
                start, tiles, within, score, sizes, True, STAGES, C, BEYOND,
            )),
            (consume, (
                q_tiles.index(1), q_full, ring, (turns.index(1), turns.index(0)), OUT, normaliser, batch, head, number,
                start + 64, tiles, within, score, sizes, False, STAGES, C, BEYOND,
            )),
            (produce, (Q, K, V, q_tiles, q_full, ring, batch, head, head_kv, start, tiles, STAGES, C)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
