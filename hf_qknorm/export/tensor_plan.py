"""A plan of tensors under other names, shapes and values; each is computed once, at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 2.0**32  # factor of a tensor: a larger one could overflow 32 bits


class Planned(NamedTuple):
    """A tensor to be made: its shape and dtype, and a function that computes its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


class TensorPlan:
    """The tensors of an export by name; at first those of `tensors`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.planned = {name: Planned(tuple(x.shape), x.dtype, x.detach) for name, x in tensors.items()}
        self.scaled_halves: dict[str, float] = {}  # factors of tensors in float16

    def tensors(self) -> dict[str, Tensor]:
        """Compute the tensors, each rounded once."""
        return {name: each.make().to(each.dtype).contiguous() for name, each in self.planned.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.planned

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is written."""
        return self.planned[name].dtype

    def reader(self, name: str) -> Callable[[], Tensor]:
        """Return a function that computes the tensor as it is planned now, unaffected by later changes."""
        return self.planned[name].make

    def add(self, name: str, like: str, shape: tuple[int, ...], make: Callable[[], Tensor]) -> None:
        """Add a tensor, in the dtype of the planned tensor `like`."""
        self.planned[name] = Planned(shape, self.dtype(like), make)

    def fill(self, name: str, like: str, shape: tuple[int, ...], value: float) -> None:
        """Add a constant tensor."""
        self.add(name, like, shape, lambda: torch.full(shape, value))

    def fill_missing(self, name: str, like: str, shape: tuple[int, ...], value: float) -> None:
        """Add a constant tensor, unless there is a tensor of that name."""
        if name not in self:
            self.fill(name, like, shape, value)

    def drop(self, *names: str) -> None:
        """Remove tensors that are there."""
        for name in names:
            self.planned.pop(name, None)

    def rename(self, old: str, new: str) -> None:
        """Rename a tensor that is there."""
        if old in self and old != new:
            self.add(new, old, self.planned[old].shape, self.reader(old))
            self.drop(old)

    def change(self, name: str, change: Callable[[Tensor], Tensor], shape: tuple[int, ...] | None = None) -> None:
        """Change a tensor's values, computed in float64 and rounded once, and perhaps its shape."""
        read = self.reader(name)
        self.add(name, name, shape or self.planned[name].shape, lambda: change(read().double()))

    def scale(self, name: str, factor: float, reason: str) -> None:
        """Multiply a tensor. Raises ValueError, with `reason`, if that would overflow, or round one of 16 bits."""
        if not 1 / LARGEST <= factor <= LARGEST:  # NaN too
            raise ValueError(f"{name} would be multiplied by {factor}: {reason}")
        exponent = round(math.log2(factor))
        if math.isclose(factor, 2.0**exponent, rel_tol=1e-7):  # an ε is stored in fp32
            factor = 2.0**exponent  # changes exponents alone; float16 has few of them: see `check_halves`
        else:
            self.require_wide(name, reason)
        if factor != 1:
            self.change(name, lambda x: x * factor)
            if self.dtype(name) == torch.float16:
                self.scaled_halves[name] = self.scaled_halves.get(name, 1.0) * factor

    def check_halves(self) -> None:
        """Read the scaled tensors in float16. Raises ValueError if the product of all factors rounds one."""
        for name, factor in self.scaled_halves.items():
            values = self.reader(name)()
            if not torch.allclose(values.half().double(), values, rtol=0, atol=0, equal_nan=True):
                raise ValueError(
                    f"it would not be exact in float16: {name} would be multiplied by {factor:g}, which rounds numbers "
                    "near the ends of its range again. Save the checkpoint in float32 first "
                    "(model.float().save_pretrained(...)), or convert it in bfloat16, and export that"
                )

    def require_wide(self, name: str, reason: str) -> None:
        """Raise ValueError, with `reason`, if the tensor has fewer than 32 bits: a change would round it visibly."""
        dtype = self.dtype(name)
        if dtype.itemsize < 4:
            raise ValueError(
                f"it would not be exact in {str(dtype).removeprefix('torch.')}: {reason}, which rounds {name} again. "
                "Save the checkpoint in float32 first (model.float().save_pretrained(...)) and export that"
            )
