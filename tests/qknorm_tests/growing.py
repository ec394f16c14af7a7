"""Count the compilations of each kernel over growing lengths, without compiling, and the lengths that it is specialised
for; print them as JSON.

Run as a script: kernels defined while TRITON_INTERPRET is set can't be compiled.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "benchmarks"))

from compiled import Target

from hf_qknorm.ops import triton as triton_kernels
from hf_qknorm.ops.triton import attention, norm_rope
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible

half = partial(torch.empty, dtype=torch.bfloat16)
D = 64


def draw(length: int, heads: int = 8) -> torch.Tensor:
    """Heads laid out as a projection leaves them."""
    return half(2, length, heads, D).transpose(1, 2)


def rotation(length: int) -> Rotary:
    return Rotary(half(2, length, D // 2), half(2, length, D // 2))


def decode(keys: int) -> None:
    """A step with a growing cache: norm and RoPE, then attention over all keys."""
    norm = Norm("rms", half(D))
    made = norm_rope.forward(draw(1), draw(1, 2), norm, norm, rotation(1))
    cache = half(2, 2, keys, D)
    attention.forward(Heads(made.q, cache, cache), Visible(), Options(D**-0.5, None, True))


def train(length: int) -> None:
    """A step of training, forward and backward."""
    norm = Norm("rms", half(D))
    heads = Heads(draw(length), draw(length, 2), draw(length, 2), norm, norm, rotation(length))
    options = Options(D**-0.5, None, True)
    result = attention.forward(heads, Visible(), options)
    attention.backward(draw(length), heads, Visible(), options, result.out, result.normaliser)


def prefill(queries: int, keys: int) -> None:
    """A chunk of queries behind cached keys, and its gradients."""
    heads, options = Heads(draw(queries), half(2, 2, keys, D), half(2, 2, keys, D)), Options(D**-0.5, None, True)
    result = attention.forward(heads, Visible(), options)
    attention.backward(draw(queries), heads, Visible(), options, result.out, result.normaliser)


def specialised() -> dict[str, int]:
    """The number of lengths that each kernel of the package is compiled anew for."""
    modules = [import_module(f"{triton_kernels.__name__}.{x.name}") for x in iter_modules(triton_kernels.__path__)]
    kernels = {x.__name__: x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)}
    return {
        name: sum(p.name in NAMES and not p.do_not_specialize for p in kernel.params)
        for name, kernel in kernels.items()
        if name.endswith("_kernel")
    }


NAMES = {"queries", "keys", "length", "window", "splits", "section"}
KEYS = (256, 257, 272, 511, 512, 513, 1000, 1024, 4096, 5000)
LENGTHS = (1, 2, 15, 16, 17, 100, 128, 1000, 1024, 8192)
CASES = {
    "decode": lambda: [decode(keys) for keys in KEYS],
    "train": lambda: [train(length) for length in LENGTHS],
    "prefill": lambda: [prefill(queries, keys) for queries in (70, 80, 128) for keys in KEYS],
}


def main() -> None:
    """Print the number of different compilations of each kernel of each case."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    def count(case: str, kernel: Any, key: str, *_: Any) -> None:
        found[case][kernel.__name__].add(key)

    driver.set_active(Target(int(sys.argv[1])))
    for name, case in CASES.items():
        JITFunction._do_compile = lambda kernel, key, *rest, name=name: count(name, kernel, key)
        case()
    found["lengths of"] = {name: range(count) for name, count in specialised().items()}
    counts = {name: {kernel: len(keys) for kernel, keys in kernels.items()} for name, kernels in found.items()}
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    main()
