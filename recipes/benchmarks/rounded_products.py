"""Products of bf16 matrices on a CPU without AVX-512: those of the same numbers in fp32, rounded once.

torch's own products round as often, and take nine times as long on such a CPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}


class RoundedProducts(TorchDispatchMode):
    """Computes the products of bf16 matrices on a CPU in fp32, with one rounding at the end."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if func in PRODUCTS and all(x.dtype == torch.bfloat16 and x.is_cpu for x in tensors):
            args = tree_map(lambda x: x.float() if isinstance(x, Tensor) else x, args)
            return func(*args, **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


def rounded_products(device: str) -> AbstractContextManager[Any]:
    """`RoundedProducts` where torch's own products of bf16 matrices are slow."""
    slow = device == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    return RoundedProducts() if slow else nullcontext()
