"""The order in which the programs of an attention kernel start, and how many of them share a block of keys.

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

START = 3.0  # tiles that take as long as the start and the end of a program
PARTIAL = 3.0  # and as a program's partial sums, which it stores in fp32 and another one reads
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
    """The programs that share a block of keys, and the heads of a section times that number."""

    parts: int
    section: int


def key_costs(lines: Lines, group: int, units: int, division: Division) -> list[float]:
    """The costs of the programs of `units` key heads, in their order; each takes some of the heads of a group."""
    parts = division.parts
    overhead = START + (PARTIAL if parts > 1 else 0.0)
    members = [(i + 1) * group // parts - i * group // parts for i in range(parts)]
    tiles = lines.tiles()
    return [
        overhead + members[unit % parts] * tiles[block]
        for unit, block in order(units * parts, len(tiles), division.section)
    ]


@lru_cache(1024)
def divide(lines: Lines, group: int, units: int, size: int, gpu: Gpu) -> Division:
    """The division of the blocks of keys of `units` heads for which the simulated time is shortest.

    Programs share a block by the query heads of its group. `size` is the number of bytes of a group's queries and
    their gradients. Blocks are shared where there are fewer than two for each processor. Partial sums then have at most
    `WAVES` blocks for each processor, with two fp32 numbers for each entry.
    """
    programs = -(-lines.length // lines.block)
    whole = units * programs

    def division(parts: int) -> Division:
        return Division(parts, section(units * parts, programs, -(-size // parts), gpu))

    if whole >= 2 * gpu.processors:
        return division(1)
    most = max(1, min(group, WAVES * gpu.processors // whole))
    divisions = [division(parts) for parts in sorted({-(-group // n) for n in range(1, group + 1)}) if parts <= most]
    return min(divisions, key=lambda each: makespan(key_costs(lines, group, units, each), gpu.processors))
