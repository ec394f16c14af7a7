"""The storages that a computation allocates, as torch's dispatcher sees them, and other numbers in new memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestStorage(TorchDispatchMode):
    """Records the elements of the largest tensor that any operator returns, views counted by what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


def fill_new_memory(monkeypatch: pytest.MonkeyPatch, number: float = torch.nan) -> list[int]:
    """Fill tensors that are made without numbers, and list their sizes; missing writes and stray reads show so."""
    sizes = []

    def filled(create: Any) -> Any:
        def new(*arguments: Any, **options: Any) -> Tensor:
            x = create(*arguments, **options)
            if x.is_floating_point():
                sizes.append(x.numel())
                x.detach().fill_(number)  # an empty leaf of torch 2.11 has gradients
            return x

        return new

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (Tensor, "new_empty"),
        (torch, "empty_strided"),
        (Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))
    return sizes
