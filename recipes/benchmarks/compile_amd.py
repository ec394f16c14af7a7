"""Compile the kernels for AMD's MI300 (gfx942) without a GPU, and print which compile, and their registers.

    python recipes/benchmarks/compile_amd.py

hf_qknorm refuses AMD GPUs; this shows what is missing. Triton's wheel holds its compiler for AMD. The kernels take
Ampere's tiles, with pointers, and one loop of dk and dv. Prints Markdown: vector registers and those spilled, of a
thread, and bytes of shared memory, of which a program has 65,536. Exits with 1 if no kernel compiles. Run it without
TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any
from unittest.mock import patch

import torch
import triton
from compile_kernels import CASES, line
from compiled import Target, constants_of_loops, constants_text
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from hf_qknorm.ops.triton import launch
from hf_qknorm.ops.triton.architectures import AMPERE

SHARED = 65_536
TILES = {key: x._replace(key_gradient=x.key_gradient._replace(one_loop=True)) for key, x in AMPERE.tiles.items()}
MI300 = AMPERE._replace(tiles=TILES)
COLUMNS = ("kernel", "configuration", "registers", "spilled", "shared", "obstacle")


class Amd(Target):
    """The part of a driver for AMD that Triton needs to compile."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", "gfx942", 64)


def compile_all(names: list[str]) -> dict[str, str | None]:
    """The rows of a table, each with the reason why the kernel does not run on such a GPU, or None."""
    rows: dict[str, str | None] = {}
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        constants = {p.name: options.get(p.name) for p in kernel.params if p.is_constexpr}
        dtype = next(str(x.dtype).removeprefix("torch.") for x in tensors(options) if x.dtype.is_floating_point)
        loops = constants_of_loops(constants)
        configuration = f"{dtype} {constants_text(loops[0])}"
        try:
            compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
        except Exception as error:  # of any kind: the next kernel is compiled nevertheless
            obstacle = f"does not compile: {' '.join(str(error).split())[:120]}"
            rows[line(kernel.__name__, configuration, "", "", "", obstacle)] = obstacle
            return
        code = compiled.asm["amdgcn"]
        registers, spilled = (int(re.findall(rf"\.vgpr_{x}:\s*(\d+)", code)[-1]) for x in ("count", "spill_count"))
        shared = compiled.metadata.shared
        nvidia = any(loop.get("TANH") == "approx" for loop in loops)  # the assembler only complains on stderr
        obstacle = "needs the exact tanh: approx is NVIDIA's" if nvidia else None
        obstacle = obstacle or ("too much shared memory" if shared > SHARED else "spills" if spilled else None)
        cells = kernel.__name__, configuration, registers, spilled, f"{shared:,}", obstacle or ""
        rows[line(*cells)] = obstacle

    with patch.object(JITFunction, "run", compile_only), patch.object(launch, "architecture", lambda device: MI300):
        active = driver._active
        driver.set_active(Amd(0))
        try:
            for name in names:
                CASES[name].launch()
        finally:
            driver._active = active
    return rows


def tensors(options: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among a kernel's arguments and the fields of its tuples."""
    values = [x for value in options.values() for x in (value if isinstance(value, tuple) else (value,))]
    return [x for x in values if isinstance(x, torch.Tensor)]


def main() -> str | None:
    """Print the table; returns a complaint if nothing compiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = ("raw", "fp16", "plain 16", "uncapped 64", "step, uncapped")
    parser.add_argument("--case", action="append", choices=CASES, help=f"default: {', '.join(cases)}")
    args = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("kernels are interpreted: unset TRITON_INTERPRET")
    rows = compile_all(args.case or list(cases))
    print(f"gfx942, Triton {triton.__version__}, PyTorch {torch.__version__}\n")
    print(line(*COLUMNS), line(*("-" * len(COLUMNS))), *rows, sep="\n", end="\n\n")
    sound = sum(obstacle is None for obstacle in rows.values())
    print(f"{sound} of {len(rows)} kernels compile, fit the shared memory and spill nothing.")
    return None if sound else "no kernel compiles for gfx942 as it should"


if __name__ == "__main__":
    sys.exit(main())
