"""Compile the backward kernel of Triton's tutorial on attention beside this package's, without a GPU.

    python recipes/benchmarks/compile_tutorial.py 06-fused-attention.py --arch 80 --arch 90

The file is `python/tutorials/06-fused-attention.py` of https://github.com/triton-lang/triton, of the version that is
installed. Its function launches its own tiles. Both are causal attention in fp16 without norm, RoPE and cap. Prints
Markdown: for dk and dv, and for dq, instructions of the main loop for one score, registers, bytes that a thread spills,
and of all loops of tiles the instructions that store or load these. The tutorial has one kernel for all, here are two.
Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import importlib.util
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import sass
import torch
import triton
from compile_kernels import PLAIN, Case, line
from compiled import Report, compiling, reloads
from kernel_limits import LIMITS
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

COLUMNS = ("GPU", "head_dim", "gradient", "whose", "tile", "warps", "registers", "spills", "reloads", "slots")


def load(path: Path, arch: int) -> ModuleType:
    """The tutorial's module, imported as on such a GPU."""
    spec = importlib.util.spec_from_file_location("tutorial", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.object(torch.cuda, "get_device_capability", lambda *_: divmod(arch, 10)):
        spec.loader.exec_module(module)
    return module


def tutorial_rows(path: Path, arch: int, head_dim: int) -> list[str]:
    """The rows of the tutorial's kernel."""
    rows: list[str] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if "BLOCK_N1" not in options:
            return
        found = run(kernel, *arguments, grid=grid, warmup=True, **options)
        usage, code = sass.read(found.asm["cubin"], found.metadata.name)
        loops = sass.matrix_loops(code)
        scores = [sum(i.opcode.startswith("MUFU.EX2") for i in loop) for loop in loops]  # of a thread
        main = [len(loop) / n for loop, n in zip(loops, scores, strict=True) if n == max(scores)]
        if len(main) != 2:
            raise SystemExit(f"expected two main loops of {kernel.__name__} in {path}, got {scores} scores")
        for gradient, end, slots in zip(("dk, dv", "dq"), "12", main, strict=True):
            tile = f"{options[f'BLOCK_M{end}']}×{options[f'BLOCK_N{end}']}"
            cells = tile, found.metadata.num_warps, usage.registers, usage.stack, reloads(loops), f"{slots:.1f}"
            rows.append(line(arch, head_dim, gradient, "tutorial", *cells))

    q = torch.empty(1, 8, 1024, head_dim, dtype=torch.float16)
    normaliser = torch.empty(1, 8, 1024)
    call = SimpleNamespace(saved_tensors=(q, q, q, q, normaliser), sm_scale=0.1, HEAD_DIM=head_dim, causal=True)
    with compiling(arch), patch.object(driver._active, "get_active_torch_device", lambda: q.device, create=True):
        module = load(path, arch)
        with patch.object(JITFunction, "run", compile_only):
            module._attention.backward(call, q)
    return rows


def own_rows(arch: int, head_dim: int) -> list[str]:
    """The rows of this package's kernels."""
    with compiling(arch) as reports:
        Case(head_dim, torch.float16, **PLAIN).launch()
    names = {"key_gradient_kernel": "dk, dv", "query_gradient_kernel": "dq"}
    rows = []
    for report in reports:
        if isinstance(report, Report) and report.kernel in names:
            tile = f"{report.constants['BLOCK_M']}×{report.constants['BLOCK_N']}"
            cells = tile, report.warps, report.registers, report.spilled, report.reloads, f"{report.slots:.1f}"
            rows.append(line(arch, head_dim, names[report.kernel], "here", *cells))
    return sorted(rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the tutorial")
    parser.add_argument("--arch", type=int, action="append", choices=LIMITS, help="default: 80, 89, 90 and 120")
    parser.add_argument("--head-dim", type=int, action="append", help="default: 64 and 128")
    args = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("kernels are interpreted: unset TRITON_INTERPRET")
    print(f"Triton {triton.__version__}, PyTorch {torch.__version__}\n")
    print(line(*COLUMNS), line(*("-" * len(COLUMNS))), sep="\n")
    for arch, head_dim in product(args.arch or (80, 89, 90, 120), args.head_dim or (64, 128)):
        print(*tutorial_rows(args.file, arch, head_dim), *own_rows(arch, head_dim), sep="\n")


if __name__ == "__main__":
    main()
