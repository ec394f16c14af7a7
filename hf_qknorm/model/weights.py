"""Checks before weights are changed in place: that the optimiser keeps the change, and that no weight gets it twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# DeepSpeed's attributes, for ZeRO-1 and 2 and for ZeRO-3: of parameters in its optimiser, and of parameters that it
# copies or divides. ZeRO-3 divides a model while it is loaded.
OPTIMISED: Final = ("_hp_mapping", "_z3_optimizer")
COPIED: Final = ("_hp_mapping", "ds_id")


def check_not_copied(model: nn.Module, use: str, attributes: Sequence[str] = COPIED) -> None:
    """Raise ValueError, with the `use` of the weights, for a model whose weights DeepSpeed copies or divides.

    Its optimiser steps copies of its own, writes them over the model's weights, and does not know weights that are
    added.
    """
    for name, parameter in model.named_parameters():
        if any(hasattr(parameter, attribute) for attribute in attributes):
            raise ValueError(
                f"{use} needs the model's own weights, and DeepSpeed has copies of them ({name}), which its next step "
                "writes over any change: do it before DeepSpeed takes the model, or save the model and load the "
                "checkpoint in a process without DeepSpeed; where each step needs it, train with DDP or FSDP2"
            )


def check_unshared(model: nn.Module, parameters: Iterable[Tensor], change: str) -> None:
    """Raise ValueError, with what makes the `change`, if the model holds one of the parameters in two places.

    The places share a tensor, as tied weights and the layers of Zamba do, or its memory.
    """
    changed = {_memory(parameter) for parameter in parameters}
    places: dict[tuple[str, int], str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (memory := _memory(parameter)) in changed and (other := places.setdefault(memory, name)) != name:
            raise ValueError(
                f"{other} and {name} share weights: {change} would change both, or one of them twice. Give each its "
                "own weights before"
            )


def _memory(parameter: Tensor) -> tuple[str, int]:
    """What equals that of another parameter exactly if both have the same memory."""
    has_address = not isinstance(parameter, DTensor) and not parameter.is_meta and parameter.numel()
    return ("address", parameter.data_ptr()) if has_address else ("tensor", id(parameter))
