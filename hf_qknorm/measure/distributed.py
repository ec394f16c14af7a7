"""Models of several processes: shards put together, and models that one process must measure."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.weights import check_not_copied


def full_tensor(parameter: Tensor) -> Tensor:
    """A parameter with all shards; every rank must call this."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def require_whole(model: nn.Module) -> None:
    """Raise ValueError for a model that is wrapped for several processes, or of which this one has a part."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # slow to import

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
    """Free the full parameters of a model under FSDP that a forward pass left in place of the shards.

    Changes of these would be lost. Under FSDP 1's `summon_full_params`, which keeps changes, parameters stay whole.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # slow to import
    from torch.distributed.fsdp._common_utils import HandleTrainingState
    from torch.distributed.fsdp._runtime_utils import _reshard  # FSDP 1 has no method for it

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        handle = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if handle is None or not handle.uses_sharded_strategy or module._is_root is None:  # None before a pass
            continue
        if handle._training_state is HandleTrainingState.IDLE:
            _reshard(module, handle, True)
