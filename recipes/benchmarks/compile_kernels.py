"""Compile every kernel configuration without a GPU, print a table, and check registers, spills and instructions.

    python recipes/benchmarks/compile_kernels.py --arch 90
    python recipes/benchmarks/compile_kernels.py --arch 80 --arch 89 --arch 100 --arch 120 --few

Calls the package's functions with CPU tensors; each kernel that they launch is compiled for that GPU, and not started:
80 (A100), 86 (RTX 30), 89 (RTX 40, L40S), 90 (H100), 100 (B200), 103 (B300), 120 (RTX 50) or 121 (DGX Spark). Prints
Markdown; exits with 1 and the broken limits. Every kernel must compile, and fit the shared memory; `kernel_limits.py`
has the limits of spills, in bytes of a thread, and the matrix instructions. Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import torch
import triton
from compiled import Failure, Report, compiling
from kernel_limits import HOPPER, complain
from page import table

from hf_qknorm.ops.triton import attention, gluon, norm_rope
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible

COLUMNS = ("kernel", "configuration", "warps", "stages", "registers", "spills", "shared", "matrix", "size")
SHAPE = torch.ones(3)  # of norms with a knee: one kernel serves all shapes
ARCHS = (80, 86, 89, 90, 100, 103, 120, 121)


@dataclass(frozen=True)
class Case:
    """A training step of causal attention with norm and RoPE."""

    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    norm: str = "rms"
    knee: bool = False  # whether norms read their shape from memory
    rotary: float = 1.0  # the part of head_dim that is rotated
    interleaved: bool = False
    softcap: float | None = 50.0
    window: int | None = None
    dropout: float = 0.0
    ranges: bool = False
    sinks: bool = False
    statistics: bool = False
    gluon: bool = False  # the forward pass for Hopper alone

    def launch(self) -> None:
        """Call forward and backward."""
        os.environ[gluon.SWITCH] = str(int(self.gluon))
        b, h, hk, t = 36, 8, 2, 1024
        d = self.head_dim
        empty = partial(torch.empty, dtype=self.dtype)
        q, k, v = (empty(b, t, n, d).transpose(1, 2) for n in (h, hk, hk))
        norm = Norm(self.norm, None if self.norm == "none" else empty(d), knee=SHAPE if self.knee else None)
        cos = empty(1, t, int(d * self.rotary) // 2)
        rotary = Rotary(cos, cos, self.interleaved) if self.rotary else None
        ranges = torch.zeros(b, t, 2, dtype=torch.int32) if self.ranges else None
        seed = torch.zeros(1, dtype=torch.int64) if self.dropout else None
        heads = Heads(q, k, v, norm, norm, rotary)
        visible = Visible(ranges, empty(h) if self.sinks else None, seed)
        options = Options(d**-0.5, self.softcap, True, self.window, self.dropout)
        out = attention.forward(heads, visible, options, self.statistics)
        if not self.statistics and not self.gluon:
            attention.backward(torch.empty_like(out.out), heads, visible, options, out.out, out.normaliser)


@dataclass(frozen=True)
class Step:
    """A step of generation: norm and RoPE in one launch, then attention to a cache."""

    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    softcap: float | None = 50.0
    knee: bool = False
    queries: int = 1

    def launch(self) -> None:
        """Norm and rotate; then attend."""
        b, h, hk, t, s, d = 2, 8, 2, self.queries, 4096, self.head_dim
        empty = partial(torch.empty, dtype=self.dtype)
        q, k = (empty(b, t, n, d).transpose(1, 2) for n in (h, hk))
        norm, cos = Norm("rms", empty(d), knee=SHAPE if self.knee else None), empty(1, t, d // 2)
        q = norm_rope.forward(q, k, norm, norm, Rotary(cos, cos)).q
        cached = empty(b, hk, s, d)
        attention.forward(Heads(q, cached, cached), Visible(), Options(d**-0.5, self.softcap, causal=True))


RAW = {"norm": "none", "rotary": 0.0}
PLAIN = RAW | {"softcap": None}
USUAL = {  # of each kernel, the most frequent configurations
    **{f"capped {d}": Case(d) for d in (128, 64)},
    **{f"uncapped {d}": Case(d, softcap=None) for d in (128, 64)},
    **{f"dropout {d}": Case(d, **PLAIN, dropout=0.1) for d in (128, 64)},
    "step 128": Step(),
}
CASES = USUAL | {
    **{f"capped {d}": Case(d) for d in (256, 96)},
    "uncapped 256": Case(256, softcap=None),
    **{f"knee {d}": Case(d, softcap=None, knee=True) for d in (128, 64)},
    "knee, layer": Case(64, norm="layer", knee=True),
    **{f"fp32 {d}": Case(d, torch.float32, **PLAIN) for d in (256, 128)},
    "fp16": Case(dtype=torch.float16, **RAW),
    "plain 16": Case(16, **PLAIN),
    "raw": Case(**RAW),
    "interleaved": Case(96, interleaved=True, softcap=None),
    "partial": Case(80, norm="layer", rotary=0.4, softcap=None),
    **{f"lp, knee {knee}": Case(64, norm="lp", softcap=None, knee=knee) for knee in (False, True)},
    "ranges": Case(**PLAIN, ranges=True),
    "window": Case(**PLAIN, window=256, sinks=True),
    "dropout, capped": Case(dropout=0.1),
    "statistics": Case(**PLAIN, statistics=True),
    **{f"gluon, cap {cap}": Case(softcap=cap, gluon=True) for cap in (50.0, None)},
    "gluon, fp16": Case(dtype=torch.float16, **RAW, gluon=True),
    **{f"step {d}": Step(d) for d in (256, 64)},
    "step, uncapped": Step(softcap=None),
    "step, knee": Step(knee=True),
    "step, fp32": Step(dtype=torch.float32),
    "steps": Step(queries=20),
}
# Every kernel in every dtype, of the smallest heads: over the registers of wide ones ptxas spends minutes.
SMALL = {
    f"{kind.__name__} {dtype}": kind(16, dtype, **options)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for kind, options in ((Case, {"interleaved": True, "softcap": None}), (Step, {"queries": 20}))
}


def cases_of(arch: int, args: argparse.Namespace) -> list[Case | Step]:
    """The chosen cases that are for this GPU; of the few, the usual ones on Hopper alone."""
    usual = USUAL if arch == HOPPER else {}
    chosen = SMALL | usual if args.few else {name: CASES[name] for name in args.case or CASES}
    return [case for case in chosen.values() if arch == HOPPER or not (isinstance(case, Case) and case.gluon)]


def compile_case(arch: int, case: Case | Step) -> list[Report | Failure]:
    """Reports of the kernels that a case launches."""
    torch.set_num_threads(1)
    with compiling(arch) as reports:
        case.launch()
    return reports


def row(x: Report) -> tuple[str, ...]:
    """A line of the table."""
    matrix = " ".join(f"{n} {name}" for name, n in x.matrix.items())
    numbers = map(str, (x.warps, x.stages, x.registers, x.spilled))
    return x.kernel, x.configuration, *numbers, f"{x.shared:,}", matrix, str(x.size)


def main() -> str | None:
    """Print the tables; return the complaints, if any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, action="append", choices=ARCHS, help=f"default: {HOPPER}")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--case", action="append", choices=CASES, help="one of the cases; default: all")
    chosen.add_argument("--few", action="store_true", help="small heads, and on Hopper the usual configurations")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("kernels are interpreted: unset TRITON_INTERPRET")
    jobs = [(arch, case) for arch in args.arch or [HOPPER] for case in cases_of(arch, args)]
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        found = list(pool.map(compile_case, *zip(*jobs, strict=True)))
    complaints = []
    for arch in dict.fromkeys(arch for arch, _ in jobs):
        results = [result for (at, _), results in zip(jobs, found, strict=True) if at == arch for result in results]
        rows = dict.fromkeys(row(result) for result in results if isinstance(result, Report))
        print(f"sm_{arch}, Triton {triton.__version__}, PyTorch {torch.__version__}\n", *table(COLUMNS, rows), sep="\n")
        complaints += [f"sm_{arch} {complaint}" for result in results for complaint in complain(result, arch)]
    return "\n".join(dict.fromkeys(complaints)) or None


if __name__ == "__main__":
    sys.exit(main())
