"""The order in which the programs of an attention kernel start.

A GPU starts programs in the order of their numbers, each on the processor that is free first. So that all processors
end at one time, the longest programs start first. So that keys and values come from the L2 cache, heads are taken in
sections which fit into it. `score_math.place` computes the order on the device.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Gpu(NamedTuple):
    """The number of processors, and the bytes of the L2 cache."""

    processors: int
    cache: int


HOPPER = Gpu(132, 50_000_000)


@cache
def gpu(device: torch.device) -> Gpu:
    """The GPU of a device; of a Hopper's size where there is none."""
    if device.type != "cuda":
        return HOPPER
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, properties.L2_cache_size)


def query_section(q: Tensor, k: Tensor, block: int) -> int:
    """Query heads of a section, for blocks of the queries q `[B, H, T, D]`, which read the keys k `[B, Hk, S, D]`."""
    (batch, heads, queries, _), (_, heads_kv, keys, head_dim) = q.shape, k.shape
    group, size = heads // heads_kv, 2 * keys * head_dim * k.element_size()  # of the keys, and as many values
    return group * _section(batch * heads_kv, group * -(-queries // block), size, gpu(k.device))


def key_section(q: Tensor, k: Tensor, block: int) -> int:
    """Key heads of a section, for blocks of the keys k `[B, Hk, S, D]`, which read the queries q `[B, H, T, D]`."""
    (batch, heads, queries, head_dim), (_, heads_kv, keys, _) = q.shape, k.shape
    size = 2 * heads // heads_kv * queries * head_dim * q.element_size()  # of the queries, and their gradients
    return _section(batch * heads_kv, -(-keys // block), size, gpu(k.device))


@lru_cache(1024)
def _section(heads: int, programs: int, size: int, gpu: Gpu) -> int:
    """Heads of a section, each of so many programs, which read `size` bytes together; it divides the heads evenly.

    A section fits the L2 cache, but has two programs for each processor at least: with fewer, the long programs of the
    next one would start while processors are still busy with these.
    """
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    enough = [n for n in divisors if n * programs >= 2 * gpu.processors] or [heads]
    return max((n for n in enough if n * size <= gpu.cache), default=enough[0])
