"""Changes of a model in memory that are made whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig


@contextmanager
def undone_on_error(*models: nn.Module) -> Iterator[Callable[[Tensor], None]]:
    """A context that any exception ends with the models as they were before, Ctrl-C and a lack of memory included.

    Restored are classes and attributes of all modules, their parts, and their configs. The values of a tensor are
    restored if it was passed to the function that the context yields, before it was written to.
    """
    modules = [module for model in models for module in model.modules()]
    configs = (vars(module).get("config") for module in modules)
    owners: list[Any] = [*modules, *{id(x): x for x in configs if isinstance(x, PretrainedConfig)}.values()]
    states = []
    for owner in owners:  # with copies of the tables of parts, parameters and buffers
        table = {name: x.copy() if type(x) in (dict, set) else x for name, x in vars(owner).items()}
        states.append((owner, type(owner), table))
    values: list[tuple[Tensor, Tensor]] = []
    try:
        yield lambda tensor: values.append((tensor, tensor.detach().clone()))
    except BaseException:
        for owner, cls, attributes in states:
            owner.__class__ = cls
            vars(owner).clear()
            vars(owner).update(attributes)
        for tensor, before in reversed(values):  # a tensor that was kept twice gets its first values
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(before)
        raise
