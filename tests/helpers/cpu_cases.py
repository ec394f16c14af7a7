"""Problems for the C++ kernels: their results, and the dropout that they draw."""

from __future__ import annotations

import torch
from tiled_cases import Case, Inputs, named
from torch import Tensor

from hf_qknorm.ops.cpu import kernels

WORD = (1 << 32) - 1


def cpu_results(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Output and gradients of the kernels."""
    with torch.no_grad():
        call = (inputs.heads, inputs.visible, case.options)
        out, normaliser = kernels.forward(*call)
        return named(out, *kernels.backward(inputs.grad, *call, out, normaliser))


def mix64(x: int) -> int:
    """splitmix64."""
    word = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & word
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
    return x ^ (x >> 31)


def mix32(x: Tensor) -> Tensor:
    """lowbias32 of unsigned numbers."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = x ^ (x >> 15)
    x = ((x * (0x846CA68B >> 16) & WORD) * (1 << 16) + x * (0x846CA68B & 0xFFFF)) & WORD  # int64 must not overflow
    return x ^ (x >> 16)


def cpu_dropout(case: Case, inputs: Inputs) -> Tensor | None:
    """The factors of the weights `[B, H, T, S]`: a hash of seed and row, and one of that and the key."""
    if inputs.seed is None:
        return None
    shape = (case.batch, case.heads, case.queries)
    mixed = [mix64((int(inputs.seed) + mix64(row)) & ((1 << 64) - 1)) for row in range(torch.Size(shape).numel())]
    low, high = (torch.tensor([x >> shift & WORD for x in mixed]).view(*shape, 1) for shift in (0, 32))
    keys = torch.arange(case.queries if case.keys is None else case.keys)
    drawn = mix32(mix32((low + keys) & WORD) ^ high)
    return (drawn >= round(case.dropout * 2**32)).to(inputs.q.dtype) / (1 - case.dropout)
