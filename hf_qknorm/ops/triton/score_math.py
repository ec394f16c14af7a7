"""What is done to a tile of scores, on the device: which of them count, the cap, dropout.

A tile meets BLOCK_M queries with BLOCK_N keys. Whatever a batch hides, the keys that a query sees are one range, and so
are the queries that see a key: a tile inside of all ranges needs no mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def query_block(queries, heads, heads_kv, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """Which block of queries this program has, the number of its head among all of the batch, batch, head, kv head."""
    blocks = tl.cdiv(queries, BLOCK)
    number = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest first: the last to end are short
    head = number % heads
    return block, number, number // heads, head, head // (heads // heads_kv)


@triton.jit
def keys_seen(
    rows, ranges, batch, queries, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RANGES: tl.constexpr
):
    """First key that each query of `rows` sees, and the one after its last. Rows past the end repeat the last one."""
    return _limits(rows, ranges, batch, queries, keys, window, CAUSAL, False, WINDOW, RANGES)


@triton.jit
def queries_seeing(
    cols, ranges, batch, queries, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RANGES: tl.constexpr
):
    """First query that sees each key of `cols`, and the one after its last. Keys past the end repeat the last one."""
    return _limits(cols, ranges, batch, keys, queries, window, False, CAUSAL, WINDOW, RANGES)


@triton.jit
def _limits(
    lines, ranges, batch, length, across, window,
    UNTIL: tl.constexpr, FROM: tl.constexpr, WINDOW: tl.constexpr, RANGES: tl.constexpr,
):  # fmt: skip
    """For lines of `length`, what they meet of `across`: all up to their own place (UNTIL), or all from it on (FROM),
    within the window, and within their ranges `[B, length, 2]`.
    """
    lines = tl.minimum(lines, length - 1)
    place = lines + (across - length)
    first = place * 0
    last = first + across
    if UNTIL:
        last = tl.minimum(place + 1, last)
        if WINDOW:
            first = tl.maximum(place - window + 1, first)
    elif FROM:
        first = tl.maximum(place, first)
        if WINDOW:
            last = tl.minimum(place + window, last)
    elif WINDOW:
        first = tl.maximum(place - window, first)
        last = tl.minimum(place + window + 1, last)
    if RANGES:
        at = ranges + 2 * (batch.to(tl.int64) * length + lines)
        first, last = tl.maximum(tl.load(at), first), tl.minimum(tl.load(at + 1), last)
    return first, last


@triton.jit
def segments(first_low, last_low, first_high, last_high, BLOCK: tl.constexpr):
    """Where the tiles start, where those without a mask start and stop, and where all stop.

    From the limits of a block's lowest and highest line: limits never go back.
    """
    start = first_low // BLOCK * BLOCK
    full_start = tl.cdiv(first_high, BLOCK) * BLOCK
    full_stop = tl.maximum(last_low // BLOCK * BLOCK, full_start)
    return start, full_start, full_stop, last_high


@triton.jit
def not_mine(bound, group, limit, WHEN: tl.constexpr):
    """Whether another launch serves this group of heads: `bound` holds the largest norms of its queries and keys.

    WHEN is "within" (the bound on the scores is at most `limit`), "beyond" (it is not, or is NaN), or "always".
    """
    others = False
    if WHEN != "always":
        within = tl.load(bound + 2 * group) * tl.load(bound + 2 * group + 1) <= limit
        others = within != (WHEN == "within")
    return others


@triton.jit
def tanh(x, HOW: tl.constexpr):
    """tanh, as exactly as HOW says; "odd7" for |x| ≤ 0.75 alone (1.1e-5, relative), "approx" the unit's (4.9e-4)."""
    y, _ = tanh_and_slope(x, HOW)
    return y


@triton.jit
def tanh_and_slope(x, HOW: tl.constexpr):
    """tanh, as above, and 1 − tanh², which if "exact" is so near the cap too, where the difference has few bits."""
    if HOW == "odd7":
        u = x * x
        y = ((-0.035452777 * u + 0.127426963) * u - 0.332696707) * u + 0.999988984
        y = y * x
        slope = 1.0 - y * y
    elif HOW == "approx":
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        slope = 1.0 - y * y
    else:
        u = x * x
        y = ((-0.00585216801 * u + 0.0207536283) * u - 0.0537687045) * u + 0.13331689
        y = ((y * u - 0.333332833) * u + 0.999999998) * x
        e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
        rest = 2.0 * e / (1.0 + e)  # of 1, in full: (1 − e)/(1 + e) would lose its last bits
        far = 1.0 - rest
        near = tl.abs(x) < 0.6
        slope = tl.where(near, 1.0 - y * y, rest * (2.0 - rest))
        y = tl.where(near, y, tl.where(x < 0, -far, far))
    return y, slope


@triton.jit
def kept(seed, head, rows, cols, rate):
    """Which weights dropout keeps: a function of the seed, the head, the query and the key alone (Philox)."""
    key = cols + rows * 0
    drawn, _, _, _ = tl.philox(seed, key, key * 0 + rows, key * 0 + head, key * 0)
    return drawn.to(tl.uint32, bitcast=True) * 2.3283064365386963e-10 >= rate
