"""A plan of tensors to be written under other names, shapes and values; each is computed when it is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hf_qknorm.checkpoint.safetensors_files import NewTensor, StoredTensor, Weights

LARGEST = 2.0**32  # factor of a tensor: a larger one could overflow 32 bits


class TensorPlan:
    """The tensors to be written, by name; at first the ones of `weights`. Nothing is read before they are written."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.planned: dict[str, StoredTensor | NewTensor] = {**weights.stored}
        self.scaled_halves: dict[str, float] = {}  # factors of tensors in float16

    def __contains__(self, name: str) -> bool:
        return name in self.planned

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is written."""
        planned = self.planned[name]
        return planned.dtype if isinstance(planned, NewTensor) else self.weights.dtype(name)

    def reader(self, name: str) -> Callable[[], Tensor]:
        """Return a function that computes the tensor as it is planned now, unaffected by later changes."""
        planned = self.planned[name]
        return planned.make if isinstance(planned, NewTensor) else partial(self.weights.read, name)

    def add(self, name: str, like: str, shape: tuple[int, ...], make: Callable[[], Tensor]) -> None:
        """Add a tensor, in the file and dtype of the planned tensor `like`."""
        self.planned[name] = NewTensor(self.planned[like].file, shape, self.dtype(like), make)

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
        """Change a tensor's values, computed in float64 and rounded once on writing, and perhaps its shape."""
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
