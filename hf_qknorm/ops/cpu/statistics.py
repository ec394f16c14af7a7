"""The logits of each head, measured by the C++ kernels on the CPU."""

from __future__ import annotations

import torch

from hf_qknorm.ops.cpu import attention, kernels
from hf_qknorm.ops.tiled import HeadStatistics
from hf_qknorm.ops.types import Heads, Options, Visible


@torch.no_grad()
def head_statistics(heads: Heads, visible: Visible, options: Options, cap: float = 50.0) -> HeadStatistics:
    """`tiled.head_statistics` in C++, in fp32.

    Raises ValueError for a call that it does not take, and RuntimeError where the kernels can't be compiled, both as
    `attention.attention` does.
    """
    attention.check(heads, visible, options)
    numbers = kernels.measure(heads, visible, options, cap)
    largest, entropy, *counts = numbers.unbind(-1)
    seen, over_half, over_cap = (x.sum((0, 2), dtype=torch.float64).to(torch.int64) for x in counts)
    queries = (counts[0] > 0).sum((0, 2)).clamp_min(1)
    top = largest.amax((0, 2)) if largest.numel() else largest.new_zeros(heads.q.shape[1])
    return HeadStatistics(top, entropy.sum((0, 2)) / queries, seen, over_half, over_cap)
