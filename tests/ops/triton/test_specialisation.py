"""Growing lengths compile no kernel anew: a cache grows with each token, and texts of a batch differ in length.

The test runs this file as a script: kernels that are defined while TRITON_INTERPRET is set can't be compiled.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_qknorm.ops.triton import attention, norm_rope
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible

ROOT = Path(__file__).parents[3]
FORWARD, SPLIT = {"norm_rope_kernel": 1, "forward_kernel": 1}, {"split_kernel": 1, "combine_kernel": 1}
GRADIENTS = {"row_terms_kernel": 1, "query_gradient_kernel": 1, "key_gradient_kernel": 1}
KEYS = (256, 257, 272, 511, 512, 513, 1000, 1024, 4096, 5000)
LENGTHS = (1, 2, 15, 16, 17, 100, 128, 1000, 1024, 8192)


@pytest.mark.slow
def test_a_kernel_serves_every_length() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "recipes" / "benchmarks")])
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == {
        "decode": {"norm_rope_kernel": 1} | SPLIT,
        "train": FORWARD | GRADIENTS,
        "train, interleaved": FORWARD | GRADIENTS | {"norm_rope_gradient_kernel": 1},
        "prefill": {"forward_kernel": 1} | SPLIT | GRADIENTS,
    }


def draw(length: int, heads: int = 2) -> torch.Tensor:
    """Heads laid out as a projection leaves them."""
    return torch.empty(2, length, heads, 64, dtype=torch.bfloat16).transpose(1, 2)


def step(heads: Heads, gradients: bool = True) -> None:
    """Forward, and backward."""
    options = Options(0.125, None, True)
    result = attention.forward(heads, Visible(), options)
    if gradients:
        attention.backward(torch.empty_like(heads.q), heads, Visible(), options, result.out, result.normaliser)


def parts(length: int, interleaved: bool = False) -> tuple[Norm, Norm, Rotary]:
    norm, angles = Norm("rms", torch.empty(64, dtype=torch.bfloat16)), torch.empty(2, length, 32)
    return norm, norm, Rotary(angles, angles, interleaved)


def decode(keys: int) -> None:
    """A step with a growing cache: norm and RoPE, then attention over all keys."""
    q = norm_rope.forward(draw(1, 8), draw(1), *parts(1)).q
    cache = torch.empty(2, 2, keys, 64, dtype=torch.bfloat16)
    step(Heads(q, cache, cache), gradients=False)


def main() -> None:
    """Print the number of different compilations of each kernel, without compiling."""
    from compiled import Target
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    driver.set_active(Target(90))
    cases: dict[str, Any] = {
        "decode": lambda: [decode(keys) for keys in KEYS],
        "train": lambda: [step(Heads(draw(n, 8), draw(n), draw(n), *parts(n))) for n in LENGTHS],
        "train, interleaved": lambda: [step(Heads(draw(n, 8), draw(n), draw(n), *parts(n, True))) for n in LENGTHS],
        "prefill": lambda: [step(Heads(draw(t, 8), draw(s), draw(s))) for t in (70, 80, 128) for s in KEYS],
    }
    for name, case in cases.items():
        JITFunction._do_compile = lambda kernel, key, *_, name=name: found[name][kernel.__name__].add(key)
        case()
    json.dump(
        {name: {kernel: len(keys) for kernel, keys in kernels.items()} for name, kernels in found.items()}, sys.stdout
    )


if __name__ == "__main__":
    main()
