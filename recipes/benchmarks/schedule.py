"""Simulate how evenly the programs of the attention kernels fill the processors of a Hopper, and write a page.

    python recipes/benchmarks/schedule.py --output recipes/results/schedule.md

A simulation, which needs no GPU: programs start in the order of the package's schedule, each on the processor that is
free first. A tile takes the same time everywhere; memory and caches are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hf_qknorm.ops.triton.architectures import HOPPER as ARCHITECTURE
from hf_qknorm.ops.triton.architectures import Tile
from hf_qknorm.ops.triton.launch import padded
from hf_qknorm.ops.triton.schedule import (
    HOPPER,
    LAUNCH,
    PARTIAL,
    START,
    Division,
    Lines,
    costs,
    divide,
    duration,
    section,
)

COLUMNS = (
    "length", "key heads", "group", "batch", "head_dim", "window",
    *(f"{kernel} {column}" for kernel in ("forward", "dq", "dk, dv") for column in ("before", "now", "shared by")),
    "dk, dv least", "programs", "MiB of sums",
)  # fmt: skip
PAGE = """# The order of programs, simulated

`python recipes/benchmarks/schedule.py --output recipes/results/schedule.md`

A simulation, not a measurement: programs start in the order of their numbers, each on the first of {processors}
processors that is free. A tile of the main loop takes one unit of time, the start and end of a program {start:g}, its
partial sums {partial:g}, and the launch that adds them {launch:g}. These are estimates. Memory and caches are left out.

Causal attention in bf16, with the tiles for a Hopper. Times are multiples of the ideal: the work of one program for
each block, spread evenly over all processors. **Before**: one head after the other. **Now**: the longest blocks of all
heads in a section first, and blocks **shared by** several programs where that is faster. No order of these programs is
faster than **least**. The last three columns are about the programs of dk and dv.

- With 600 or more programs, each with a whole block, the schedule takes at most 1.03 times the ideal. With a window it
  takes up to 1.06: its blocks are of equal length, and no order helps.
- With fewer blocks, several programs share one: for dk and dv they divide the queries of all heads of the group, for
  forward and dq the keys. Their starts, their partial sums and the second launch are a part of the time. It is at most
  1.03 times the ideal and 18 tiles more. One head of 16,384 queries has 128 blocks, which take 2.0 times the ideal
  whole, and 1.1 to 1.2 times shared.
- Short texts of few heads take 2 to 4 times the ideal, which is 5 to 20 tiles: starts and sums are most of the time.
  Sharing the blocks of GPT-2's 12 heads of 1,024 tokens would save at most one tile of 19, and take as long with the
  second launch.

{rows}
"""


class Shape(NamedTuple):
    """A causal attention in bf16: length, key heads, query heads of each, batch, head_dim, window."""

    length: int
    heads_kv: int
    group: int
    batch: int = 1
    head_dim: int = 128
    window: int = 0


SHAPES = [
    *(Shape(1024, 8, 4, batch) for batch in (1, 4, 16)),
    *(Shape(2048, 8, 4, batch) for batch in (1, 4, 16)),
    *(Shape(4096, 8, 4, batch) for batch in (1, 2, 4, 16)),
    *(Shape(8192, 8, 4, batch) for batch in (1, 4)),
    *(Shape(16384, 8, 4, batch) for batch in (1, 4)),
    *(Shape(length, 8, 5) for length in (2048, 4096, 16384)),
    *(Shape(length, 4, 7) for length in (2048, 4096, 16384)),
    *(Shape(length, 2, 7, head_dim=64) for length in (2048, 4096, 16384)),
    *(Shape(length, 1, 71, batch, 64) for length in (1024, 4096, 16384) for batch in (1, 4, 16)),
    *(Shape(length, 1, 4, batch, 256) for length in (4096, 16384) for batch in (1, 4)),
    *(Shape(length, 4, 2, batch, 256, 4096) for length in (8192, 16384) for batch in (1, 4)),
    *(Shape(length, 32, 1, batch, 64) for length in (1024, 4096, 16384) for batch in (1, 4)),
    *(Shape(1024, 12, 1, batch, 64) for batch in (1, 4, 16)),
    *(Shape(16384, 8, 4, batch, window=1024) for batch in (1, 4)),
    *(Shape(length, 1, group) for length in (4096, 8192, 16384, 32768) for group in (1, 2, 4, 8)),
]


class Simulated(NamedTuple):
    """The ideal in tiles; times over it: one head after the other, in the schedule's order, the least of any order."""

    ideal: float
    before: float
    now: float
    least: float
    programs: int
    parts: int

    @classmethod
    def of(cls, lines: Lines, group: int, heads: int, section: int) -> Simulated:
        """For blocks of so many heads, which meet each of their tiles `group` times."""
        before, division = Division(1, 1), divide(lines, group, heads, section, HOPPER)
        ideal = sum(costs(lines, group, heads, before)) / HOPPER.processors
        now = costs(lines, group, heads, division)
        return cls(
            ideal,
            *(duration(lines, group, heads, each, HOPPER) / ideal for each in (before, division)),
            (least(now) + (LAUNCH if division.parts > 1 else 0.0)) / ideal,
            len(now),
            division.parts,
        )


def least(costs: list[float]) -> float:
    """A time below which no order gets: of k·P + 1 programs one processor has k + 1."""
    longest, processors = sorted(costs, reverse=True), HOPPER.processors
    bounds = (sum(longest[k * (processors - 1) : k * processors + 1]) for k in range(1, -(-len(costs) // processors)))
    return max(sum(costs) / processors, longest[0], *bounds)


def for_queries(shape: Shape, kernel: str) -> Simulated:
    """The kernel "forward" or "query_gradient"."""
    tile, group, units = tile_of(shape, kernel), shape.group, shape.batch * shape.heads_kv
    lines = Lines(shape.length, tile.queries, shape.length, tile.keys, until=True, window=shape.window)
    blocks = -(-shape.length // tile.queries)
    together = section(units, group * blocks, 4 * shape.length * shape.head_dim, HOPPER)
    return Simulated.of(lines, 1, group * units, group * together)


def for_keys(shape: Shape) -> Simulated:
    """The kernel of the gradients of keys and values."""
    tile, group, units = tile_of(shape, "key_gradient"), shape.group, shape.batch * shape.heads_kv
    lines = Lines(shape.length, tile.keys, shape.length, tile.queries, since=True, window=shape.window)
    size = 4 * group * shape.length * shape.head_dim
    together = section(units, -(-shape.length // tile.keys), size, HOPPER)
    return Simulated.of(lines, group, units, together)


def tile_of(shape: Shape, kernel: str) -> Tile:
    """The kernel's tile on a Hopper, in bf16."""
    return getattr(ARCHITECTURE.tiles[2, padded(shape.head_dim)], kernel)


def sums(shape: Shape, simulated: Simulated) -> float:
    """MiB of the partial sums of dk and dv."""
    entries = shape.batch * shape.heads_kv * shape.length * shape.head_dim
    return 8 * entries * simulated.parts / 2**20 if simulated.parts > 1 else 0.0


def page() -> str:
    """The results as Markdown."""
    rows: list[Sequence[object]] = [COLUMNS, ["---:"] * len(COLUMNS)]
    for shape in SHAPES:
        forward, dq, dk = for_queries(shape, "forward"), for_queries(shape, "query_gradient"), for_keys(shape)
        times = [x for each in (forward, dq, dk) for x in (f"{each.before:.2f}", f"{each.now:.2f}", each.parts)]
        rows.append([*shape[:-1], shape.window or "", *times, f"{dk.least:.2f}", dk.programs, f"{sums(shape, dk):.0f}"])
    lines = "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)
    return PAGE.format(processors=HOPPER.processors, start=START, partial=PARTIAL, launch=LAUNCH, rows=lines)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="default: the standard output")
    args = parser.parse_args()
    text = page()
    if args.output is None:
        print(text, end="")
    else:
        args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
