"""Lines of the table of operators: the tensors and numbers that an argument may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

Values = dict[str, Any]  # the arguments of an operator, by name
Sizes = dict[str, int]  # the axes of its tensors, by name

SCALAR: Final = "() | 1"
HEADS: Final = "fp32, bf16 or fp16"
OF_Q: Final = "q's dtype"
FLOATING: Final = "floating point"
DTYPES: Final[dict[str, tuple[torch.dtype, ...]]] = {
    HEADS: (torch.float32, torch.bfloat16, torch.float16),
    FLOATING: (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "fp32": (torch.float32,),
    "int32": (torch.int32,),
    "int64": (torch.int64,),
}


@dataclass(frozen=True)
class Line:
    """A tensor: its shapes ("B Hk S D", alternatives divided by "|", "B/1" for B or 1), dtype and layout.

    "rows": dense rows, which the operator writes. "packed": contiguous. `limits` are further demands on the axes and
    the other arguments, with the words for them. `beside` is the argument without which it must be absent, and `of` the
    one without which it is not read.
    """

    shapes: str
    dtype: str
    layout: str = "any"
    optional: bool = False
    beside: str | None = None
    of: str | None = None
    limits: tuple[tuple[str, Callable[[Sizes, Values], bool]], ...] = ()

    def fits(self, x: Any, values: Values, sizes: Sizes) -> bool:
        """Whether x is such a tensor; adds its axes to the sizes."""
        if self.of is not None and values[self.of] is None:
            return True
        if self.beside is not None and (x is None) != (values[self.beside] is None):
            return False
        if x is None:
            return self.optional
        if not isinstance(x, Tensor) or x.device != torch.device("cpu") or x.layout != torch.strided:
            return False
        wanted = (values.get(self.dtype[0], x).dtype,) if self.dtype == OF_Q else DTYPES[self.dtype]
        if x.dtype not in wanted:
            return False
        shapes = [shape.replace("()", "").split() for shape in self.shapes.split("|")]
        if not any(_bind(shape, x, sizes) for shape in shapes) or not all(
            test(sizes, values) for _, test in self.limits
        ):
            return False
        return self.layout == "any" or (x.is_contiguous() if self.layout == "packed" else _has_rows(x))

    def __str__(self) -> str:
        shapes = [", ".join(one.split()).replace("/", " or ").replace("()", "") for one in self.shapes.split("|")]
        layout = {"any": "", "rows": ", dense rows of its own", "packed": ", contiguous"}[self.layout]
        limits = "".join(f", {words}" for words, _ in self.limits)
        shape, optional = " or ".join(f"[{x}]" for x in shapes), " (optional)" if self.optional else ""
        optional = optional if self.beside is None else f" (optional, with {self.beside})"
        return f"{shape}, {self.dtype}{layout}{limits}{optional}"


@dataclass(frozen=True)
class Number:
    """A number or a switch, and the words for those that fit."""

    words: str
    test: Callable[[Any, Values], bool]

    def fits(self, x: Any, values: Values, sizes: Sizes) -> bool:
        return self.test(x, values)

    def __str__(self) -> str:
        return self.words


Table = dict[str, Line | Number]


def misfits(table: Table, values: Values) -> list[str]:
    """The arguments that do not fit their lines, in the table's order; nothing is known of lines on a misfit's axes."""
    sizes: Sizes = {}
    found = []
    for name, line in table.items():
        with suppress(KeyError):
            if not line.fits(values[name], values, sizes):
                found.append(name)
                if not sizes:  # all others follow the first
                    return found
    return found


def _bind(shape: list[str], x: Tensor, sizes: Sizes) -> bool:
    """Whether x has the shape; binds the axes that have no size yet."""
    if len(shape) != x.dim():
        return False
    found = dict(sizes)
    for axis, size in zip(shape, x.shape, strict=True):
        name, _, other = axis.partition("/")
        if name.isdigit():
            known = size == int(name)
        else:
            known = found.setdefault(name, size) == size or (other == "1" and size == 1)
        if not known:
            return False
    sizes.update(found)
    return True


def _has_rows(x: Tensor) -> bool:
    overlaps = any(size > 1 and not stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.stride(-1) == 1 and not overlaps


def is_finite(x: Any) -> bool:
    return isinstance(x, (int, float)) and math.isfinite(x)
