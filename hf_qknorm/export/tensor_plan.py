"""A checkpoint's tensors on their way to other names, shapes and values: planned first, made when they are written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_qknorm.checkpoint.safetensors_files import NewTensor, StoredTensor, Weights

LARGEST = 2.0**32  # factor of a tensor, which then neither overflows nor vanishes in 32 bits


@dataclass(frozen=True)
class Part:
    """A tensor to be: the stored one whose file and dtype it takes, its shape, and how it is made (None: as it is)."""

    beside: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor] | None = None


class Draft:
    """What the tensors of `weights` will be, by name; at first what they are. Nothing is read before `write`."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.parts = {name: Part(name, stored.shape) for name, stored in weights.stored.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.parts

    def reader(self, name: str) -> Callable[[], Tensor]:
        """What gives the tensor as it is planned now, whatever becomes of its name later."""
        part = self.parts[name]
        return part.make or (lambda: self.weights.read(part.beside))

    def add(self, name: str, beside: str, shape: tuple[int, ...], make: Callable[[], Tensor]) -> None:
        """A tensor in the file and the dtype of the planned tensor `beside`."""
        self.parts[name] = Part(self.parts[beside].beside, shape, make)

    def fill(self, name: str, beside: str, shape: tuple[int, ...], value: float) -> None:
        """A tensor of one value."""
        self.add(name, beside, shape, lambda: torch.full(shape, value))

    def drop(self, *names: str) -> None:
        for name in names:
            self.parts.pop(name, None)

    def rename(self, old: str, new: str) -> None:
        if old in self.parts and old != new:
            part = dataclasses.replace(self.parts[old], make=self.reader(old))
            del self.parts[old]
            self.parts[new] = part

    def change(self, name: str, change: Callable[[Tensor], Tensor], shape: tuple[int, ...] | None = None) -> None:
        """The tensor, changed: computed in fp64 and rounded once, where it is written."""
        read = self.reader(name)
        part = self.parts[name]
        self.parts[name] = Part(part.beside, shape or part.shape, lambda: change(read().double()))

    def scale(self, name: str, factor: float, why: str) -> None:
        """The tensor times `factor`. Raises ValueError, with `why`, if that would round one of 16 bits, or overflow."""
        if not 1 / LARGEST <= factor <= LARGEST:  # false for NaN too
            raise ValueError(f"{name} would be multiplied by {factor}: {why}")
        exponent = round(math.log2(factor))
        if math.isclose(factor, 2.0**exponent, rel_tol=1e-12):
            factor = 2.0**exponent  # only moves exponents: exact in any dtype
        else:
            self.require_wide(name, why)
        if factor != 1:
            self.change(name, lambda x: x * factor)

    def require_wide(self, name: str, why: str) -> None:
        """Raise ValueError if the tensor has fewer than 32 bits, in which a changed one would be off by rounding."""
        beside = self.parts[name].beside
        if self.weights.dtype(beside).itemsize < 4:
            dtype = str(self.weights.dtype(beside)).removeprefix("torch.")
            raise ValueError(
                f"it would not be exact in {dtype}: {why}, which rounds {name} anew. Save the checkpoint in float32 "
                "first (model.float().save_pretrained(...)) and export that"
            )

    def tensors(self) -> dict[str, StoredTensor | NewTensor]:
        """The planned tensors by name."""
        return self.weights.tensors(*self._changes())

    def write(self, folder: Path) -> None:
        """Write the planned tensors into `folder`, sharded as they were."""
        self.weights.rewrite(folder, *self._changes())

    def _changes(self) -> tuple[dict[str, NewTensor], list[str]]:
        """The tensors that are made anew, and the names of those that go."""
        new = {
            name: NewTensor(stored.file, part.shape, self.weights.dtype(part.beside), part.make)
            for name, part in self.parts.items()
            if part.make is not None and (stored := self.weights.stored[part.beside])
        }
        return new, [name for name in self.weights.stored if name not in self.parts]
