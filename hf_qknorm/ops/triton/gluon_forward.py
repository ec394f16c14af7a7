"""Attention, forward, for Hopper: one warp loads tiles, two warpgroups of 64 queries each attend, in Gluon.

The same maths as in `forward`, on the same arguments, in another order of work: the scores of one tile of keys are
multiplied while the weights of the tile before meet its values, and are turned into weights while those products go
on. Tiles come from the last to the first, so that those with a mask are the first.

Keys and values are rings of STAGES tiles in shared memory. A barrier tells that a tile is there, one that both
warpgroups are done with it; each barrier's phase flips once in a round of the ring.
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

from hf_qknorm.ops.triton.attention_forward import NEVER
from hf_qknorm.ops.triton.score_math import keys_seen, not_mine, query_block, tanh

# Triton 3.6 has other names for the copies
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def place(n, STAGES: gl.constexpr):
    """Where the n-th tile lies in its ring, and the phase of its barriers."""
    return n % STAGES, n // STAGES & 1


@gluon.jit
def weigh(
    x, total, peak, last, start, unit, cap,
    MASKED: gl.constexpr, TANH: gl.constexpr, ONLINE: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Weights of the scores x `[M, N]` of the keys from `start` on, the new total and peak, and what shrinks the sums.

    A query sees the keys before its `last`.
    """
    if SCALED:
        x = x * unit
    if TANH != "none":
        x = tanh(x, TANH)
    if MASKED:
        cols = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
        x = gl.where(cols[None, :] < (last - start)[:, None], x, float("-inf"))
    shrink = peak
    if ONLINE:
        higher = gl.maximum(peak, gl.max(x, 1) * cap)
        x = x * cap - higher[:, None]
        shrink = gl.exp2(peak - higher)
        total = total * shrink
        peak = higher
    elif TANH != "none":
        x = x * cap
    p = gl.exp2(x)
    return p, total + gl.sum(p, 1), peak, shrink


@gluon.jit
def attend(
    acc, p, total, peak, begin, end, q, ring, last, tiles, unit, cap,
    BLOCK_N: gl.constexpr, PADDED: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, TANH: gl.constexpr,
    ONLINE: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Take tiles of keys into the sums, from the `begin`-th to the `end`-th; p holds the weights of the one before.

    The weights are carried as integers: bf16 numbers Triton 3.6 would take apart and pack again, one by one.
    """
    k_tiles, v_tiles, k_there, k_free, v_there, v_free = ring
    SCORES: gl.constexpr = total.type.layout.parent
    SUMS: gl.constexpr = acc.type.layout
    for n in range(begin, end):
        slot, phase = place(n, STAGES)
        v_slot, v_phase = place(n - 1, STAGES)
        mbarrier.wait(k_there.index(slot), phase)
        k = k_tiles.index(slot).reshape([BLOCK_N, PADDED]).permute((1, 0))
        x = warpgroup_mma(q, k, gl.zeros([64, BLOCK_N], gl.float32, SCORES), use_acc=False, is_async=True)
        mbarrier.wait(v_there.index(v_slot), v_phase)
        v = v_tiles.index(v_slot).reshape([BLOCK_N, PADDED])
        sums = warpgroup_mma(p.to(q.dtype, bitcast=True), v, acc, is_async=True)
        x = warpgroup_mma_wait(1, deps=(x,))
        mbarrier.arrive(k_free.index(slot), count=1)
        start = (tiles - 1 - n) * BLOCK_N
        weights, total, peak, shrink = weigh(
            x, total, peak, last, start, unit, cap, MASKED, TANH, ONLINE, SCALED
        )  # fmt: skip
        # the weights wait too: until the products are done, they read the registers of p
        acc, weights = warpgroup_mma_wait(0, deps=(sums, weights))
        mbarrier.arrive(v_free.index(v_slot), count=1)
        if ONLINE:
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        p = gl.convert_layout(weights.to(q.dtype), p.type.layout).to(gl.int16, bitcast=True)
    return acc, p, total, peak


@gluon.jit
def consume(
    q_tile, q_there, ring, OUT, normaliser, batch, head, number, start, tiles, unit, cap, queries, keys,
    BLOCK_N: gl.constexpr, PADDED: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, TANH: gl.constexpr,
    ONLINE: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """What a warpgroup does: the 64 queries from `start` on, over all tiles of keys."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PADDED, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    k_tiles, v_tiles, k_there, k_free, v_there, v_free = ring
    rows = start + gl.arange(0, 64, layout=ROWS)
    first, last = keys_seen(rows, None, batch, queries, keys, 0, CAUSAL, False, False)
    low, least = keys_seen(start, None, batch, queries, keys, 0, CAUSAL, False, False)
    masked = gl.maximum(tiles - gl.maximum(least, 0) // BLOCK_N, 1)  # tiles that some query does not see whole
    acc = gl.zeros([64, PADDED], gl.float32, SUMS)
    total = gl.zeros([64], gl.float32, ROWS)
    peak = total
    if ONLINE:
        peak = total + NEVER
    q = q_tile.reshape([64, PADDED])
    mbarrier.wait(q_there, 0)
    mbarrier.wait(k_there.index(0), 0)
    k = k_tiles.index(0).reshape([BLOCK_N, PADDED]).permute((1, 0))
    x = warpgroup_mma(q, k, gl.zeros([64, BLOCK_N], gl.float32, SCORES), use_acc=False, is_async=True)
    x = warpgroup_mma_wait(0, deps=(x,))
    mbarrier.arrive(k_free.index(0), count=1)
    weights, total, peak, shrink = weigh(
        x, total, peak, last, (tiles - 1) * BLOCK_N, unit, cap, True, TANH, ONLINE, SCALED
    )  # fmt: skip
    p = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, SUMS, 2)).to(gl.int16, bitcast=True)
    acc, p, total, peak = attend(
        acc, p, total, peak, 1, masked, q, ring, last, tiles, unit, cap,
        BLOCK_N, PADDED, STAGES, True, TANH, ONLINE, SCALED,
    )  # fmt: skip
    acc, p, total, peak = attend(
        acc, p, total, peak, masked, tiles, q, ring, last, tiles, unit, cap,
        BLOCK_N, PADDED, STAGES, False, TANH, ONLINE, SCALED,
    )  # fmt: skip
    slot, phase = place(tiles - 1, STAGES)
    mbarrier.wait(v_there.index(slot), phase)
    v = v_tiles.index(slot).reshape([BLOCK_N, PADDED])
    sums = warpgroup_mma(p.to(q.dtype, bitcast=True), v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(sums,))
    empty = total == 0  # not so for NaN, which goes on
    share = gl.where(empty, 0.0, 1.0 / total)
    at = normaliser + 2 * (number.to(gl.int64) * queries + rows)
    gl.store(at, peak, mask=rows < queries)
    gl.store(at + 1, total, mask=rows < queries)
    out = acc * gl.convert_layout(share, gl.SliceLayout(1, SUMS))[:, None]
    q.store(out.to(q.dtype))  # the queries have been read
    fence_async_shared()
    store_tile(OUT, [batch, head, start, 0], q_tile)
    tma.store_wait(0)


@gluon.jit
def produce(
    Q, K, V, q_tiles, q_there, ring, batch, head, head_kv, start, tiles, BLOCK_N: gl.constexpr, STAGES: gl.constexpr
):
    """What the loading warp does: the queries of both warpgroups, then all tiles of keys and values."""
    k_tiles, v_tiles, k_there, k_free, v_there, v_free = ring
    mbarrier.expect(q_there, 2 * Q.block_type.nbytes)
    load_tile(Q, [batch, head, start, 0], q_there, q_tiles.index(0))
    load_tile(Q, [batch, head, start + 64, 0], q_there, q_tiles.index(1))
    for n in range(tiles):
        slot, phase = place(n, STAGES)
        at = [batch, head_kv, (tiles - 1 - n) * BLOCK_N, 0]
        mbarrier.wait(k_free.index(slot), phase ^ 1)  # in the first round as if one before had been read
        mbarrier.expect(k_there.index(slot), K.block_type.nbytes)
        load_tile(K, at, k_there.index(slot), k_tiles.index(slot))
        mbarrier.wait(v_free.index(slot), phase ^ 1)
        mbarrier.expect(v_there.index(slot), V.block_type.nbytes)
        load_tile(V, at, v_there.index(slot), v_tiles.index(slot))


@gluon.jit
def gluon_forward_kernel(
    Q, K, V, OUT, normaliser, bound, unit, cap, limit, heads, heads_kv, queries, keys,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PADDED: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    TANH: gl.constexpr, ONLINE: gl.constexpr, WHEN: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """As `forward_kernel`, without windows, ranges, sinks, dropout and statistics; BLOCK_M is 128."""
    block, number, batch, head, head_kv = query_block(queries, heads, heads_kv, BLOCK_M, CAUSAL)
    if not_mine(bound, batch * heads_kv + head_kv, limit, WHEN):
        return
    start = block * BLOCK_M
    low, stop = keys_seen(start + BLOCK_M - 1, None, batch, queries, keys, 0, CAUSAL, False, False)
    tiles = gl.maximum(gl.cdiv(stop, BLOCK_N), 1)  # one for queries without keys, all of it masked
    q_tiles = gl.allocate_shared_memory(Q.dtype, [2, 1, 1, 64, PADDED], Q.layout)
    k_tiles = gl.allocate_shared_memory(K.dtype, [STAGES, 1, 1, BLOCK_N, PADDED], K.layout)
    v_tiles = gl.allocate_shared_memory(V.dtype, [STAGES, 1, 1, BLOCK_N, PADDED], V.layout)
    q_there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_there, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_there.index(i), count=1)
        mbarrier.init(v_there.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    ring = (k_tiles, v_tiles, k_there, k_free, v_there, v_free)
    gl.warp_specialize(
        [
            (consume, (
                q_tiles.index(0), q_there, ring, OUT, normaliser, batch, head, number, start, tiles, unit, cap, queries,
                keys, BLOCK_N, PADDED, STAGES, CAUSAL, TANH, ONLINE, SCALED,
            )),
            (consume, (
                q_tiles.index(1), q_there, ring, OUT, normaliser, batch, head, number, start + 64, tiles, unit, cap,
                queries, keys, BLOCK_N, PADDED, STAGES, CAUSAL, TANH, ONLINE, SCALED,
            )),
            (produce, (Q, K, V, q_tiles, q_there, ring, batch, head, head_kv, start, tiles, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
