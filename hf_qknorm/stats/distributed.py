"""Calibration by several processes: who shares a model with whom, and how sums, gains and data go around."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from hf_qknorm.model.adapters import unwrap_peft
from hf_qknorm.model.attention import head_norms, patched_layers

Batches = Sequence[dict[str, Tensor]]


class Ranks(NamedTuple):
    """The processes that compute with one model, or None for this one alone.

    Those of `data` have a copy or a shard of the weights each, and see different batches. Those of `heads` have some of
    the heads each (tensor parallelism), and see the same batches.
    """

    data: Any = None
    heads: Any = None

    def dealt(self, batches: Batches) -> list[tuple[dict[str, Tensor], bool]]:
        """This rank's part of the batches, and whether each counts: a rank that is short of one repeats the last."""
        if self.data is None:
            return [(batch, True) for batch in batches]
        rank, size = dist.get_rank(self.data), dist.get_world_size(self.data)
        turns = -(-len(batches) // size)
        places = [turn * size + rank for turn in range(turns)]
        return [(batches[min(i, len(batches) - 1)], i < len(batches)) for i in places]

    def over_data(self, x: Tensor) -> Tensor:
        """The sum of x `[...]`, on the CPU in fp64, over the ranks that have different data."""
        return _summed(x, self.data)

    def over_heads(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks that have different heads."""
        return _summed(x, self.heads)

    def here(self, parameter: Tensor) -> Tensor:
        """A gain or bias as far as this rank's heads have it."""
        return parameter.to_local() if self.heads is not None and isinstance(parameter, DTensor) else parameter

    def first(self, value: Any) -> Any:
        """The first rank's value: all ranks decide alike."""
        for group in self:
            if group is not None:
                box = [value]
                dist.broadcast_object_list(box, group=group, group_src=0)
                value = box[0]
        return value

    def all_heads(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """The numbers of all heads, from those of each rank's."""
        if self.heads is None:
            return values
        parts: list[tuple[float, ...]] = [()] * dist.get_world_size(self.heads)
        dist.all_gather_object(parts, values, self.heads)
        return tuple(value for part in parts for value in part)


ALONE = Ranks()


def ranks_of(model: nn.Module) -> Ranks:
    """The processes that share a model that is wrapped or sharded for them.

    Raises ValueError for a model that is sharded in several ways at once, or by DeepSpeed.
    """
    if isinstance(model, DistributedDataParallel):
        return Ranks(data=model.process_group)
    sharded, parallel = _fully_sharded(model), getattr(unwrapped(model), "_tp_size", None) is not None
    if any(hasattr(p, "ds_id") for p in model.parameters()) or (sharded and parallel):  # DeepSpeed's mark
        raise ValueError(
            "this model is sharded by DeepSpeed, or in several ways at once: calibrate it before, and save it"
        )
    if sharded:
        mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        if mesh.size() != dist.get_world_size():
            raise ValueError("this model is sharded over a part of the processes: calibrate it before, and save it")
        return Ranks(data=dist.group.WORLD)
    if parallel:
        mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        return Ranks(heads=mesh.get_group())
    return ALONE


def _fully_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard(model: nn.Module) -> None:
    """Let the parameters of a fully sharded model be its shards, which forward passes may leave whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(parameter: Tensor) -> Tensor:
    """A gain or bias whole, whether it is sharded or not; every rank has to ask."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def write(parameter: nn.Parameter, value: Tensor) -> None:
    """Write a gain or bias, the whole or this rank's heads, into a parameter that may be sharded."""
    value = value.to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
    elif value.shape == parameter.shape:
        parameter.copy_(distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements))
    else:
        parameter.to_local().copy_(value)


def unwrapped(model: nn.Module) -> Any:
    """The transformers model within DistributedDataParallel and PEFT's wrapper."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return unwrap_peft(model)


def gathered(batches: list[dict[str, Tensor]], max_tokens: int, ranks: Ranks) -> list[dict[str, Tensor]]:
    """The batches of all ranks: each one's first, then each one's second, … of up to `max_tokens` tokens.

    That is the order from which accelerate and `DistributedSampler` dealt them. Where all ranks have the same, once.
    """
    if ranks.data is None:
        return ranks.first(batches)
    shards: list[Batches] = [[] for _ in range(dist.get_world_size(ranks.data))]
    dist.all_gather_object(shards, [{key: x.cpu() for key, x in batch.items()} for batch in batches], ranks.data)
    if all(_equal(shard, shards[0]) for shard in shards):
        return batches
    found: list[dict[str, Tensor]] = []
    seen = 0
    for batch in (b for turn in zip_longest(*shards) for b in turn if b is not None):
        if seen >= max_tokens:
            break
        found.append(batch)
        seen += batch["input_ids"].numel()
    return found


@torch.no_grad()
def share_first(model: nn.Module, ranks: Ranks) -> None:
    """Put the first rank's attention parameters and knees into the copies of the model that other ranks have."""
    if ranks.data is None or _fully_sharded(model):
        return
    for layer in patched_layers(model).values():
        knees = (norm.eps for norm in head_norms(layer).values() if isinstance(norm.eps, Tensor))
        for tensor in (*layer.parameters(), *knees):
            dist.broadcast(tensor.data, group=ranks.data, group_src=0)


def _summed(x: Tensor, group: Any) -> Tensor:
    if group is None:
        return x
    device = "cpu" if "cpu" in str(dist.get_backend_config(group)) or dist.get_backend(group) == "gloo" else "cuda"
    total = x.to(device, copy=True)
    dist.all_reduce(total, group=group)
    return total.to(x.device)


def _equal(one: Batches, other: Batches) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(one, other, strict=True)
    )
