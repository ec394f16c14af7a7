"""Models of several processes: shards put together, and models that one process must measure."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.weights import check_not_copied


def full_tensor(parameter: Tensor) -> Tensor:
    """A parameter with all shards; every rank must call this."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def require_whole(model: nn.Module) -> None:
    """Raise ValueError for a model that is wrapped for several processes, or of which this one has a part."""
    patched_layers(model)  # raises for what is no model
    kinds = (DataParallel, DistributedDataParallel, FullyShardedDataParallel)
    found = next((type(module).__name__ for module in model.modules() if isinstance(module, kinds)), None)
    check_not_copied(model, "a measurement or calibration")
    if any(isinstance(p, DTensor) for p in model.parameters()):
        found = "FSDP2 or tensor parallelism"
    if found is not None:
        raise ValueError(
            f"this model is wrapped or sharded by {found}, and one process measures a whole model: do it before "
            "accelerator.prepare, DDP or FSDP, on every rank with the same data. Or convert the checkpoint "
            "(convert_checkpoint), and train the converted one"
        )


def reshard(model: nn.Module) -> None:
    """Free the full parameters under FSDP2 that a forward pass left in place of the shards: changes would be lost.

    Raises ValueError under FSDP 1, which has no method for it.
    """
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError("weights can't be changed between steps under FSDP 1: shard by FSDP2 (fsdp_version: 2)")
        if isinstance(module, FSDPModule):
            module.reshard()
