"""Time each launch of attention's forward and backward pass alone, with the tiles of the table and with others.

    python recipes/benchmarks/bench_tiles.py --output tiles.md

Causal, bf16, with norm, RoPE and a cap, 4 sequences of 4,096 tokens, 32 query heads and 8 key heads. A launch is
recorded and repeated with the same arguments. The results of other tiles are compared with those of the table's.
Processes compile all candidates before the first is timed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from bench_cases import Case, Inputs, draw
from bench_implementations import norms, rotary
from bench_timing import reason
from machine import made
from markdown_table import publish, table
from run_log import provenance

from hf_qknorm.ops.triton import architectures, attention, gluon, launch, norm_rope
from hf_qknorm.ops.triton.architectures import Tile
from hf_qknorm.ops.types import Heads, Options, Visible

CAP = 50.0
ROUNDING = 1e-2  # by which results of other tiles may differ, in the Frobenius norm
SAMPLES = 12
START = time.perf_counter()
Shape = tuple[Any, ...]  # queries, keys, warps, stages
SHAPES: dict[tuple[int, str], list[Shape]] = {
    (128, "forward"): [
        (128, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 128, 8, 2),
        (128, 32, 4, 4),
        (128, 64, 8, 4),
        (128, 32, 8, 4),
    ],
    (128, "query_gradient"): [
        *((128, 64, 8, 3, "u"), (128, 64, 8, 3), (128, 64, 8, 4, "u"), (64, 64, 4, 2, "u"), (64, 64, 4, 2)),
        (128, 128, 8, 2, "u"),
    ],
    (128, "key_gradient"): [
        *((64, 64, 4, 2, "u"), (64, 64, 4, 2), (64, 128, 8, 3, "u"), (64, 128, 8, 4, "u"), (64, 128, 8, 3)),
    ],
    (64, "forward"): [
        (128, 64, 8, 3),
        (64, 64, 4, 2),
        (128, 64, 8, 4),
        (128, 64, 4, 3),
        (128, 32, 4, 4),
        (64, 32, 4, 4),
    ],
    (64, "query_gradient"): [
        *((64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 4, 2), (128, 32, 4, 3), (64, 32, 4, 2), (64, 32, 4, 3, "u")),
        *((128, 64, 8, 4), (64, 64, 4, 2, "u")),
    ],
    (64, "key_gradient"): [
        *((128, 64, 4, 2), (128, 64, 4, 2, "u"), (128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3, "u"), (64, 64, 4, 4)),
    ],
    (96, "forward"): [
        *((128, 128, 8, 2, "s"), (128, 64, 8, 3, "s"), (64, 64, 4, 2, "s"), (64, 64, 4, 3, "s"), (128, 64, 4, 2, "s")),
    ],
    (96, "query_gradient"): [(128, 64, 8, 2, "s"), (128, 64, 8, 3, "s"), (64, 64, 4, 2, "s"), (64, 32, 4, 3, "s")],
    (96, "key_gradient"): [(64, 128, 8, 2, "s"), (64, 128, 8, 3, "s"), (64, 64, 4, 2, "s"), (64, 64, 4, 3, "s")],
    (256, "forward"): [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 32, 4, 3)],
    (256, "query_gradient"): [(128, 32, 8, 2, "u"), (64, 32, 4, 2, "u"), (64, 32, 4, 3, "u"), (64, 64, 4, 1, "u")],
    (256, "key_gradient"): [(64, 64, 4, 2, "a"), (32, 64, 4, 2, "a"), (32, 64, 4, 3, "a"), (64, 64, 8, 2, "a")],
    (128, "prologue"): [(16, 0, 4, 0), (32, 0, 4, 0), (64, 0, 4, 0), (16, 0, 2, 0), (32, 0, 8, 0)],
    (64, "prologue"): [(32, 0, 4, 0), (64, 0, 4, 0), (128, 0, 4, 0), (32, 0, 2, 0)],
    (128, "gluon"): [(128, 128, 4, 2), (128, 64, 4, 3)],
    (64, "gluon"): [(128, 128, 4, 2), (128, 128, 4, 3), (128, 64, 4, 4)],
    (96, "gluon"): [(128, 128, 4, 2), (128, 64, 4, 3)],
    (256, "gluon"): [(128, 64, 4, 2), (128, 32, 4, 3)],
}
DIMS = (128, 64, 96, 256)


def tile_of(shape: Shape) -> Tile:
    flags = "".join(shape[4:])
    return Tile(*shape[:4], apart="a" in flags, split="s" in flags, unhoisted=bool({*flags} & {"u", "a"}))


KERNELS = {"prologue": "norm_rope_kernel", "gluon": "gluon_forward_kernel", "forward": "forward_kernel"}


class Trial(NamedTuple):
    """A head_dim, the kernel that gets another tile, and this tile; "table" and "approx" change no tile.

    A prologue's tile is its rows and warps. "approx" takes the loop for heads without a bound.
    """

    head_dim: int
    kernel: str
    tile: Tile | None = None

    def __str__(self) -> str:
        if self.tile is None:
            return self.kernel
        hoisted = ", unhoisted" if self.tile.unhoisted else ""
        return f"{self.tile.queries}×{self.tile.keys}, {self.tile.warps} warps, {self.tile.stages} stages{hoisted}"

    @property
    def name(self) -> str:
        """The name of the kernel that it times, or nothing for all of them."""
        return "" if self.tile is None else KERNELS.get(self.kernel, f"{self.kernel}_kernel")

    @contextmanager
    def installed(self) -> Iterator[None]:
        chosen = architectures.ARCHITECTURES[torch.cuda.get_device_capability()]
        tiles, key = chosen.tiles, (2, launch.padded(self.head_dim))
        with ExitStack() as stack:
            if self.tile is None:
                limit = 0.0 if self.kernel == "approx" else launch.POLYNOMIAL_LIMIT
                stack.enter_context(patch.object(launch, "POLYNOMIAL_LIMIT", limit))
            elif self.kernel == "prologue":
                stack.enter_context(patch.dict(norm_rope.ROWS, {self.head_dim: self.tile.queries}))
                stack.enter_context(patch.object(norm_rope, "WARPS", self.tile.warps))
            elif self.kernel == "gluon":
                stack.enter_context(patch.dict(os.environ, {gluon.SWITCH: "1"}))
                stack.enter_context(patch.dict(gluon.TILES, {key[1]: (self.tile.keys, self.tile.stages)}))
            elif self.tile.split:
                stack.enter_context(patch.dict(chosen.split, {key: chosen.split[key] | {self.kernel: self.tile}}))
            else:
                stack.enter_context(patch.dict(tiles, {key: tiles[key]._replace(**{self.kernel: self.tile})}))
            yield


def trials() -> Iterator[Trial]:
    """All trials, those of the Gluon kernel last: it could hang."""
    for head_dim in DIMS:
        yield from (Trial(head_dim, kernel) for kernel in ("table", "approx")[: 1 + (head_dim == 64)])
    for (head_dim, kernel), shapes in SHAPES.items():
        yield from (Trial(head_dim, kernel, tile_of(shape)) for shape in shapes)


def passes(trial: Trial, x: Inputs) -> tuple[list[Any], list[torch.Tensor]]:
    """The launches of forward, or of both passes where a gradient is timed, and the results."""
    heads = Heads(x.q, x.k, x.v, *norms(x), rotary(x))
    call = heads, Visible(), Options(x.q.shape[-1] ** -0.5, CAP, causal=True)
    launches: list[Any] = []
    with launch.recorded(launches), trial.installed():
        found = attention.forward(*call)
        results = [found.out]
        if trial.kernel not in ("forward", "prologue", "gluon"):
            gradients = attention.backward(x.grad, *call, found.out, found.normaliser)
            results += [y for y in gradients if y is not None]
    return launches, results


def compile_apart(trial: Trial, x: Inputs) -> None:
    """Launch the trial's kernel alone, so that it is compiled; what it reads is not."""

    def chosen(kernel: Any, *arguments: Any, **options: Any) -> None:
        if trial.name in ("", kernel.__name__):
            launch.launch(kernel, *arguments, **options)

    with ExitStack() as stack:
        for module in (attention, norm_rope, gluon):
            stack.enter_context(patch.object(module, "launch", chosen))
        passes(trial, x)
    torch.cuda.synchronize()


def milliseconds(record: Any) -> float:
    """The median time of a launch, on data that other launches may have left in the cache."""
    run, arguments = record.started[record.grid], [*record.arguments.values()]
    run(*arguments)
    times = []
    for _ in range(SAMPLES):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)
        start.record()
        run(*arguments)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[SAMPLES // 2]


def timed(trial: Trial, x: Inputs, expected: list[torch.Tensor]) -> Iterator[list[str]]:
    """A row for each launch that the trial changes."""
    launches, results = passes(trial, x)
    far = max(
        float((got.double() - wanted.double()).norm() / wanted.double().norm())
        for got, wanted in zip(results, expected, strict=False)
    )
    for record in launches:
        started = record.started
        name = started.metadata.name
        if trial.name in ("", name):
            notes = f"{started.n_regs} registers, {started.n_spills} B spilled, {started.metadata.shared:,} B shared"
            differs = "" if far < ROUNDING else f"; WRONG by {far:.1e}"
            yield [str(trial.head_dim), name, str(trial), f"{milliseconds(record):.4f}", notes + differs]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the Markdown there as well")
    parser.add_argument("--compiled", action="store_true", help="start with times: the cache has all kernels")
    parser.add_argument("--kernels", nargs="+", help="of these alone")
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    wanted = [x for x in trials() if args.kernels is None or x.kernel in args.kernels]
    inputs = {d: draw(Case(32, 8, d, 512, batch=4), 1, torch.device("cuda"), torch.bfloat16)[0] for d in DIMS}
    if args.part is not None:
        number, count = args.part
        for trial in wanted[number::count]:
            try:
                compile_apart(trial, inputs[trial.head_dim])
            except Exception as error:
                print(trial.head_dim, trial.kernel, trial, reason(error), file=sys.stderr, flush=True)
        return 0
    count = 0 if args.compiled else min(os.cpu_count() or 1, 15)
    compiling = [subprocess.Popen([sys.executable, __file__, "--part", str(n), str(count)]) for n in range(count)]
    for process in compiling:
        process.wait()
    print(f"compiled after {time.perf_counter() - START:.0f} s", flush=True)
    rows: list[list[str]] = []
    for head_dim, last in dict.fromkeys((x.head_dim, x.kernel == "gluon") for x in wanted):
        (x,) = draw(Case(32, 8, head_dim, 4096, batch=4), 1, torch.device("cuda"), torch.bfloat16)
        expected = passes(Trial(head_dim, "table"), x)[1]
        for trial in wanted:
            if (trial.head_dim, trial.kernel == "gluon") == (head_dim, last):
                begin = len(rows)
                try:
                    rows += timed(trial, x, expected)
                except Exception as error:
                    rows.append([str(head_dim), trial.kernel, str(trial), "", reason(error)])
                print(*(" | ".join(row) for row in rows[begin:]), sep="\n", flush=True)
    head = ["head_dim", "kernel", "tile", "ms", ""]
    publish("\n".join(["# Tiles", "", provenance([{"made": made()}]), "", *table(head, rows)]), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
