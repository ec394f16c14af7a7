"""Edits of an operator's arguments, one at a time: other dtypes, shapes, layouts, devices and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from fuzz.lines import Table, Values

DTYPES: Final = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64),
)
NUMBERS: Final = (-math.inf, -1.0, 0.0, 1e-30, 0.5, 1.0, 1e30, math.inf, math.nan)
INTEGERS: Final = (-(1 << 63), -1, 0, 1, 7, 1 << 31, (1 << 63) - 1)
GUARD: Final = 64  # entries around a guarded tensor


def edits(values: Values, table: Table) -> Iterator[tuple[str, Values]]:
    """Yield each edit of each argument, with words for it."""
    for name, x in values.items():
        if isinstance(x, Tensor) and getattr(table.get(name), "optional", False):
            yield f"{name} absent", values | {name: None}
        for words, edited in _of(x):
            yield f"{name} {words}", values | {name: edited}


def _of(x: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, Tensor):
        yield "on another device", x.to("meta")
        yield from ((f"in {dtype}", x.to(dtype)) for dtype in DTYPES if dtype != x.dtype)
        yield from _shapes(x)
        yield from _layouts(x)
        if not x.is_floating_point():
            info = torch.iinfo(x.dtype)
            yield from ((f"of {n}", torch.full_like(x, n)) for n in (info.min, -1, 0, info.max))
    elif isinstance(x, bool):
        yield f"{not x}", not x
    elif isinstance(x, (int, float)):
        yield from ((f"{n}", n) for n in (INTEGERS if isinstance(x, int) else NUMBERS))
    elif isinstance(x, str):
        yield "of an unknown kind", "unknown"


def _shapes(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    own = tuple(x.shape)
    shapes = [(*own[:axis], other, *own[axis + 1 :]) for axis, size in enumerate(own) for other in _sizes(size)]
    shapes += [own[1:], (1, *own), (*own, 1), (x.numel(),)]
    for shape in dict.fromkeys(shapes):
        if shape != own:
            made = torch.zeros(shape, dtype=x.dtype)
            count = min(made.numel(), x.numel())
            made.view(-1)[:count] = x.reshape(-1)[:count]
            yield f"of shape {list(shape)}", made


def _sizes(size: int) -> list[int]:
    return [0, 1, size - 1, size + 1, 3 * size, 257] if size > 1 else [0, 2, 257]


def _layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not x.dim():
        return
    yield "with gaps in rows", torch.stack([x, x], -1)[..., 0]
    yield "of entries that share memory", x[..., :1].expand_as(x)
    if x.dim() > 1:
        yield "transposed", x.transpose(0, -1).contiguous().transpose(0, -1)
        yield "of rows that share memory", x[:1].expand_as(x)
        yield "in rows with gaps", torch.cat([x, x], -1)[..., : x.shape[-1]]


def guarded(x: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of x with its strides inside of other memory, and that memory, filled with NaN or the largest integer."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    poison = math.nan if x.is_floating_point() or x.is_complex() else x.dtype == torch.bool or torch.iinfo(x.dtype).max
    memory = x.new_full((span + 2 * GUARD,), poison)
    memory[GUARD : GUARD + span] = x.as_strided((span,), (1,), x.storage_offset())
    return memory.as_strided(x.shape, x.stride(), GUARD), memory
