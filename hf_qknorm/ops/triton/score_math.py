"""The arithmetic of a tile of scores on the device: which of them are visible, the cap, dropout.

A tile is the scores of BLOCK_M queries and BLOCK_N keys. The keys that a query sees are always one range, and so are
the queries that see a key: a tile inside of all its ranges needs no mask. `C` is `arguments.Constants`, `sizes` is
`arguments.Sizes`; `ops/README.md` derives the formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


class QueryBlock(NamedTuple):
    """A block of queries: its first row, its head's number in the whole batch, the batch, the head and its key head."""

    start: Any
    number: Any
    batch: Any
    head: Any
    head_kv: Any


class QueryRows(NamedTuple):
    """Rows of queries; each sees the keys from `first` on, before `last`."""

    first: Any
    last: Any


@triton.jit
def place(blocks, section):
    """Head and block of this program. In a section of heads, all first blocks start before the second ones."""
    number = tl.program_id(0)
    programs = section * blocks
    return number // programs * section + number % section, number % programs // section


@triton.jit
def query_block(sizes, C: tl.constexpr):
    """The block of queries of this program."""
    blocks = tl.cdiv(sizes.queries, C.BLOCK_M)
    number, block = place(blocks, sizes.section)
    if C.CAUSAL:
        block = blocks - 1 - block  # the longest first, so that the last ones to end are short
    head = number % sizes.heads
    head_kv = head // (sizes.heads // sizes.heads_kv)
    return QueryBlock(block * C.BLOCK_M, number, number // sizes.heads, head, head_kv)


@triton.jit
def keys_seen(rows, batch, ranges, sizes, C: tl.constexpr):
    """First key that each query of `rows` sees, and the one after its last. Rows past the end repeat the last one."""
    return _limits(rows, batch, ranges, sizes.queries, sizes.keys, sizes.window, C.CAUSAL, False, C.WINDOW, C.RANGES)


@triton.jit
def keys_within(key, rows, C: tl.constexpr):
    """Which of the keys `[BLOCK_N]` from `key` on the queries of `rows` see."""
    cols = tl.arange(0, C.BLOCK_N)[None, :]
    seen = cols < (rows.last - key)[:, None]
    if C.WINDOW or C.RANGES:  # without these, no key is hidden at the start
        seen &= cols >= (rows.first - key)[:, None]
    return seen


@triton.jit
def queries_seeing(cols, batch, ranges, sizes, C: tl.constexpr):
    """First query that sees each key of `cols`, and the one after its last. Keys past the end repeat the last one."""
    return _limits(cols, batch, ranges, sizes.keys, sizes.queries, sizes.window, False, C.CAUSAL, C.WINDOW, C.RANGES)


@triton.jit
def _limits(
    lines, batch, ranges, length, across, window,
    UNTIL: tl.constexpr, FROM: tl.constexpr, WINDOW: tl.constexpr, RANGES: tl.constexpr,
):  # fmt: skip
    """For lines of `length`, the range of `across` that they meet: up to their own place (UNTIL), or from it on (FROM),
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
def key_segments(block, ranges, sizes, C: tl.constexpr):
    """Starts and stops of three segments of keys for a block of queries: with a mask, without one, with one.

    Limits never decrease: the block's first and last query have the least and the largest.
    """
    first_low, last_low = keys_seen(block.start, block.batch, ranges, sizes, C)
    first_high, stop = keys_seen(block.start + C.BLOCK_M - 1, block.batch, ranges, sizes, C)
    start = first_low // C.BLOCK_N * C.BLOCK_N
    full_start = tl.cdiv(first_high, C.BLOCK_N) * C.BLOCK_N
    full_stop = tl.maximum(last_low // C.BLOCK_N * C.BLOCK_N, full_start)
    return (start, full_start, full_stop), (tl.minimum(full_start, stop), tl.minimum(full_stop, stop), stop)


@triton.jit
def serves(bound, group, limit, WHEN: tl.constexpr):
    """Whether a loop serves this group of heads: `bound` holds the largest norms of its queries and keys.

    WHEN is "within" (the bound on the scores is at most `limit`), "beyond" (it is not, or is NaN), or "always".
    """
    served = True
    if WHEN != "always":
        within = tl.load(bound + 2 * group) * tl.load(bound + 2 * group + 1) <= limit
        served = within == (WHEN == "within")
    return served


@triton.jit
def capped(x, cap, C: tl.constexpr):
    """Scores x after tanh, if they have a cap; without a running maximum times `cap`, as logits.

    With a maximum the product is left to the instruction that subtracts it, which rounds once.
    """
    if C.TANH == "polynomial" and not C.ONLINE:  # the cap is a factor of its coefficients, the same for all tiles
        x = _polynomial(x, cap)
    elif C.TANH != "none":
        x, _ = tanh_and_slope(x, C.TANH)
        if not C.ONLINE:
            x = x * cap
    return x


@triton.jit
def _polynomial(x, cap):
    """cap·tanh(x); its numbers are local, as each launch compares global constants, which takes time."""
    u = x * x
    return ((0.108397968 * cap * u - 0.330128044 * cap) * u + 0.999936879 * cap) * x


@triton.jit
def tanh_and_slope(x, HOW: tl.constexpr):
    """tanh and its derivative 1 − tanh².

    HOW is "polynomial" (for |x| ≤ 0.6, relative error 6.3e-5), "approx" (the GPU's instruction, 4.9e-4) or "exact",
    which keeps the derivative's relative precision near ±1 too.
    """
    if HOW == "polynomial":
        y = _polynomial(x, 1.0)
        slope = 1.0 - y * y
    elif HOW == "approx":
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        slope = 1.0 - y * y
    else:
        u = x * x
        y = ((-0.000353345473 * u + 0.00228222948) * u - 0.00791744422) * u + 0.021464821
        y = (((y * u - 0.0538709126) * u + 0.133321598) * u - 0.333332777) * u + 1.0
        y = y * x
        e = _precise_exp2(tl.abs(x) * (-2 * LOG2E))
        rest = 2.0 * e / (1.0 + e)  # 1 − |tanh|; 1 − (1 − e)/(1 + e) would cancel
        far = 1.0 - rest
        near = tl.abs(x) < 1.0  # below it the error of 1 − r is several roundings
        slope = tl.where(near, 1.0 - y * y, rest * (2.0 - rest))
        y = tl.where(near, y, tl.where(x < 0, -far, far))
    return y, slope


@triton.jit
def _precise_exp2(x):
    """2^x for x ≤ 0 with fp32's rounding: the GPU's instruction has three times its error, but none for integers."""
    x = tl.where(x < -120.0, -120.0, x)
    whole = tl.floor(x + 0.5)
    u = x - whole
    y = ((0.000153458124 * u + 0.00133999309) * u + 0.00961848907) * u + 0.0555032864
    return (((y * u + 0.240226462) * u + 0.693147182) * u + 1.0) * tl.exp2(whole)


@triton.jit
def kept(seed, head, query, key, score, C: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """Which weights dropout keeps of the tile that starts at `query` and `key`: `[M, N]`, or `[N, M]` if TRANSPOSED.

    A function of the seed, the head, the query and the key alone. A call of Philox has eight numbers of 16 bits, for
    the queries i, i + 8 and the keys j, j + 8, j + 16, j + 24: matrix instructions leave these eight scores in one
    thread. Transposed, these are the four with j and j + 8, so that half of the numbers are of no use.
    """
    HALVES: tl.constexpr = 1 if TRANSPOSED or C.BLOCK_N < 32 else 2  # of each number of 32 bits that are in use
    queries = (query // 2 + tl.arange(0, C.BLOCK_M // 2)).to(tl.uint32)
    keys = (key // (2 * HALVES) + tl.arange(0, C.BLOCK_N // (2 * HALVES))).to(tl.uint32)
    ROWS: tl.constexpr = C.BLOCK_N if TRANSPOSED else C.BLOCK_M
    COLUMNS: tl.constexpr = C.BLOCK_M if TRANSPOSED else C.BLOCK_N
    queries = queries[None, :] if TRANSPOSED else queries[:, None]
    keys = keys[:, None] if TRANSPOSED else keys[None, :]
    if HALVES == 1:
        keys = keys // 16 * 8 + keys % 8
    zeros = queries * 0 + keys * 0
    near, key_far, query_far, far = philox(seed, zeros + queries, zeros + keys, zeros + head.to(tl.uint32), zeros)
    numbers = tl.join(tl.join(near, key_far), tl.join(query_far, far))
    if HALVES == 1:
        numbers = numbers.reshape(ROWS // 16, 8, COLUMNS // 16, 8, 2, 2)
        numbers = numbers.permute(0, 4, 1, 2, 5, 3) if TRANSPOSED else numbers.permute(0, 5, 1, 2, 4, 3)
        shift = ((key + tl.arange(0, C.BLOCK_N)) // 16 % 2 * 16).to(tl.uint32)
        numbers = numbers.reshape(ROWS, COLUMNS) << (shift[:, None] if TRANSPOSED else shift[None, :])
    else:
        numbers = tl.join(numbers, numbers << 16).reshape(ROWS // 16, 8, COLUMNS // 32, 8, 2, 2, 2)
        numbers = numbers.permute(0, 5, 1, 2, 6, 4, 3).reshape(ROWS, COLUMNS)
    return numbers.to(tl.int32, bitcast=True) >= score.drop_below


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """Four random numbers of 32 bits for a seed and four counters: Philox 4x32 with 7 rounds, as `tl.philox`.

    Here a product of 64 bits is one instruction instead of two.
    """
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        even = c0.to(tl.uint64) * 0xD2511F53
        odd = c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (odd >> 32).to(tl.uint32) ^ c1 ^ k0, odd.to(tl.uint32)
        c2, c3 = (even >> 32).to(tl.uint32) ^ c3 ^ k1, even.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def drop(p, keep, score):
    """The weights p, or 0 where dropout drops them, before the factor `rescale`."""
    zero = score.rescale * 0.0  # with a constant the compiler selects after rounding to bf16: two instructions more
    return tl.where(keep, p, zero)
