"""Compile kernels that break the limits, as the recipe does, and exit with its complaints.

Run as a script: kernels defined while TRITON_INTERPRET is set can't be compiled.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "benchmarks"))

import compile_kernels as recipe
from compiled import compiling


@triton.jit
def forward_kernel(x, out, count, PADDED: tl.constexpr):
    """Needs more registers than there are."""
    side = tl.arange(0, PADDED)
    at = side[:, None] * PADDED + side[None, :]
    total = tl.zeros([PADDED, PADDED], tl.float32)
    for n in range(0, count):
        y = tl.load(x + at + n * PADDED * PADDED)
        total = tl.dot(y, y, total)
    tl.store(out + at, total)


@triton.jit
def query_gradient_kernel(x, out, count, PADDED: tl.constexpr):
    """Does not compile."""
    tl.store(out, tl.load(x + tl.arange(0, PADDED - 1)))


if __name__ == "__main__":
    x, out = torch.empty(256, 256, dtype=torch.bfloat16), torch.empty(256, 256)
    with compiling(recipe.HOPPER) as results:
        for kernel in (forward_kernel, query_gradient_kernel):
            kernel[(1,)](x, out, 100, PADDED=256, num_warps=4, enable_fp_fusion=True)
    sys.exit("\n".join(complaint for result in results for complaint in recipe.complain(result, recipe.HOPPER)))
