"""The modules of a model that FSDP2 shards."""

from __future__ import annotations

from typing import Any

from torch import nn


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules in `model` that FSDP2 has sharded."""
    from torch.distributed.fsdp import FSDPModule  # slow to import

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free the full parameters of an FSDP2 model that a forward pass left in place of the shards.

    What is written into them is lost.
    """
    for module in fsdp_modules(model):
        module.reshard()
