"""The modules of a model that FSDP shards."""

from __future__ import annotations

from torch import nn


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
