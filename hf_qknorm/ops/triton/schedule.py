"""The order in which the programs of an attention kernel start, and how many of them share a block.

A GPU starts programs in the order of their numbers, each on the processor that is free first. So that all processors
end at one time, the longest programs start first. So that keys and values come from the L2 cache, heads are taken in
sections which fit into it. `score_math.place` computes the order on the device, `order` here.

Costs are in tiles of the main loop, and a simulation of a GPU adds them up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops.triton.architectures import Tile
from hf_qknorm.ops.triton.launch import reach
from hf_qknorm.ops.types import Options

START = 3.0  # tiles that take as long as the start and the end of a program
PARTIAL = 3.0  # and as a program's partial sums, which it stores in fp32 and another one reads
LAUNCH = 4.0  # and as the launch that adds them up
WAVES = 4  # programs of divided blocks for each processor, at most: this bounds the memory of partial sums


class Gpu(NamedTuple):
    """The number of processors, and the bytes of the L2 cache."""

    processors: int
    cache: int


HOPPER = Gpu(132, 50_000_000)


@cache
def gpu(device: torch.device) -> Gpu:
    """The GPU of a device; of a Hopper's size where there is none."""
    if device.type != "cuda":
        return HOPPER
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, properties.L2_cache_size)


@lru_cache(1024)
def section(heads: int, programs: int, size: int, gpu: Gpu) -> int:
    """Heads of a section, each of so many programs, which read `size` bytes together; it divides the heads evenly.

    A section fits the L2 cache, but has two programs for each processor at least: with fewer, the long programs of the
    next one would start while processors are still busy with these.
    """
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    enough = [n for n in divisors if n * programs >= 2 * gpu.processors] or [heads]
    return max((n for n in enough if n * size <= gpu.cache), default=enough[0])


def query_section(k: Tensor, heads: int, queries: int, block: int) -> int:
    """Query heads of a section, for blocks of queries which read the keys k `[B, Hk, S, D]` and as many values."""
    batch, heads_kv, keys, head_dim = k.shape
    group = heads // heads_kv
    programs = group * -(-queries // block)
    size = 2 * keys * head_dim * k.element_size()
    return group * section(batch * heads_kv, programs, size, gpu(k.device))


def order(heads: int, blocks: int, section: int) -> Iterator[tuple[int, int]]:
    """Head and block of each program in the order of their numbers, as `score_math.place` computes them."""
    for first in range(0, heads, section):
        for block in range(blocks):
            for head in range(first, first + section):
                yield head, block


def makespan(costs: Iterable[float], processors: int) -> float:
    """The time after which the last processor is done with programs of these costs, in their order."""
    ends = [0.0] * processors
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


class Lines(NamedTuple):
    """Queries or keys of a head, `length` of them, in blocks of `block`, which meet `across` keys or queries in tiles.

    `until` and `since`: a causal line meets those up to its own place, as a query does, or from it on, as a key does.
    """

    length: int
    block: int
    across: int
    tile: int
    until: bool = False
    since: bool = False
    window: int = 0

    def tiles(self) -> list[int]:
        """The number of tiles of each block."""
        return [self._tiles(start) for start in range(0, self.length, self.block)]

    def _tiles(self, start: int) -> int:
        first, _ = self._limits(start)
        _, last = self._limits(min(start + self.block, self.length) - 1)
        return max(0, -(-(last - first // self.tile * self.tile) // self.tile))

    def _limits(self, line: int) -> tuple[int, int]:
        place = line + self.across - self.length
        first = place if self.since else place - self.window + self.until if self.window else 0
        last = place + 1 if self.until else place + self.window + (not self.since) if self.window else self.across
        return max(first, 0), min(last, self.across)


class Division(NamedTuple):
    """The programs that share a block, and the heads of a section times that number."""

    parts: int
    section: int


def costs(lines: Lines, group: int, heads: int, division: Division) -> list[float]:
    """The costs of the programs of `heads` heads, in their order; a block meets each of its tiles `group` times.

    The programs of a block have equal numbers of tiles, but for one.
    """
    parts, section = division
    overhead = START + (PARTIAL if parts > 1 else 0.0)
    tiles = [group * n for n in lines.tiles()]
    if lines.until:
        tiles.reverse()
    return [
        overhead + (unit % parts + 1) * tiles[block] // parts - unit % parts * tiles[block] // parts
        for unit, block in order(heads * parts, len(tiles), section)
    ]


def duration(lines: Lines, group: int, heads: int, division: Division, gpu: Gpu) -> float:
    """The simulated time of the programs, and of the launch that adds their sums."""
    return makespan(costs(lines, group, heads, division), gpu.processors) + (LAUNCH if division.parts > 1 else 0.0)


@lru_cache(1024)
def divide(lines: Lines, group: int, heads: int, section: int, gpu: Gpu) -> Division:
    """The division of the blocks of `heads` heads for which the simulated time is shortest, in sections if undivided.

    Blocks are shared where there are fewer than two for each processor. Partial sums then have at most `WAVES` blocks
    for each processor: in fp32, and two of them for keys.
    """
    whole, processors = heads * -(-lines.length // lines.block), gpu.processors
    divisions = [Division(1, section)]
    if whole < 2 * processors:
        halves = range(1, 2 * WAVES + 1)
        shared = sorted({half * processors // (2 * whole) for half in halves} - {0, 1})
        divisions += [Division(parts, heads * parts) for parts in shared]
    return min(divisions, key=lambda each: duration(lines, group, heads, each, gpu))


def of_queries(q: Tensor, k: Tensor, tile: Tile, options: Options) -> Division:
    """The division of blocks of queries q `[B, H, T, D]`, which meet the keys k `[B, Hk, S, D]`."""
    (b, h, t, _), s = q.shape, k.shape[2]
    lines = Lines(t, tile.queries, s, tile.keys, until=options.causal, window=reach(options.window, t, s))
    return divide(lines, 1, b * h, query_section(k, h, t, tile.queries), gpu(k.device))


def of_keys(q: Tensor, k: Tensor, tile: Tile, options: Options) -> Division:
    """The division of blocks of keys k `[B, Hk, S, D]`, which meet the queries q `[B, H, T, D]` of their group."""
    (b, h, t, d), (_, hk, s, _) = q.shape, k.shape
    lines = Lines(s, tile.keys, t, tile.queries, since=options.causal, window=reach(options.window, t, s))
    group, device = h // hk, gpu(k.device)
    size = 2 * group * t * d * k.element_size()
    return divide(lines, group, b * hk, section(b * hk, -(-s // tile.keys), size, device), device)
