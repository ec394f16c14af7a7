"""Print the Gluon kernel's machine code for Hopper as JSON: counts of instructions.

Run as a script: where TRITON_INTERPRET is set, nothing can be compiled.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "benchmarks"))

import compiled

from hf_qknorm.ops.triton import attention, gluon
from hf_qknorm.ops.types import Heads, Options, Visible


def instructions(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Replaces the recipe's description."""
    *_, opcodes = compiled.machine_code(kernel.asm["cubin"], kernel.metadata.name)
    counts = Counter(opcode.split(".")[0] for opcode in opcodes)
    loads = {opcode for opcode in opcodes if opcode.startswith("UTMALDG")}
    return {"constants": constants, "counts": counts, "loads": sorted(loads), "barriers": barriers(kernel)}


def barriers(kernel: Any) -> dict[str, int]:
    """The counts of operations on barriers in Triton's intermediate code."""
    names = ("init_barrier", "wait_barrier", "arrive_barrier", "barrier_expect", "fence_async_shared")
    return {name: kernel.asm["ttgir"].count(f"ttng.{name} ") for name in names}


if __name__ == "__main__":
    gluon.FEWEST = 0  # type: ignore[misc]
    compiled.describe = instructions
    with compiled.compiling(90) as found:
        q, k = (torch.empty(1, 300, n, gluon.HEAD_DIM, dtype=torch.bfloat16).transpose(1, 2) for n in (4, 2))
        attention.forward(Heads(q, k, k), Visible(), Options(gluon.HEAD_DIM**-0.5, 50.0, causal=True))
    json.dump(found, sys.stdout)
