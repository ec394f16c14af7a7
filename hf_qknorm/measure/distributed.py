"""Calibration in several processes: the process groups of a model, reductions, sharded parameters, and data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from hf_qknorm.measure.regroup import token_count
from hf_qknorm.model.adapters import unwrap_peft
from hf_qknorm.model.attention import every_norm, patched_layers
from hf_qknorm.model.fsdp import fsdp_modules
from hf_qknorm.model.tensor_parallel import shards_heads

Batches = Sequence[dict[str, Tensor]]


class Ranks(NamedTuple):
    """The process groups of a model; None for this process alone.

    The ranks of `data` have a copy or a shard of the weights each, and different batches. The ranks of `heads` have
    some of the heads each (tensor parallelism), and the same batches.
    """

    data: Any = None
    heads: Any = None

    def own_batches(self, batches: Batches) -> list[tuple[dict[str, Tensor], bool]]:
        """This rank's batches, and whether each counts: a rank with one batch less repeats the last."""
        if self.data is None:
            return [(batch, True) for batch in batches]
        rank, size = dist.get_rank(self.data), dist.get_world_size(self.data)
        indices = range(rank, -(-len(batches) // size) * size, size)
        return [(batches[min(i, len(batches) - 1)], i < len(batches)) for i in indices]

    def sum_over_data(self, x: Tensor) -> Tensor:
        """The sum of x `[...]`, on the CPU in fp64, over the ranks with different batches."""
        return _all_reduce(x, self.data)

    def sum_over_heads(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks with different heads."""
        return _all_reduce(x, self.heads)

    def local_part(self, parameter: Tensor) -> Tensor:
        """The part of a gain or bias that belongs to this rank's heads."""
        return parameter.to_local() if self.heads is not None and isinstance(parameter, DTensor) else parameter

    def broadcast(self, value: Any) -> Any:
        """The first rank's value."""
        for group in self:
            if group is not None:
                box = [value]
                dist.broadcast_object_list(box, group=group, group_src=0)
                value = box[0]
        return value

    def gather_heads(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """The numbers of all heads, from the numbers of each rank's heads."""
        if self.heads is None:
            return values
        parts: list[tuple[float, ...]] = [()] * dist.get_world_size(self.heads)
        dist.all_gather_object(parts, values, self.heads)
        return tuple(value for part in parts for value in part)


ONE_PROCESS = Ranks()


def world_size() -> int:
    """The number of processes; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first_rank() -> bool:
    """Whether this process is the one that writes and warns."""
    return world_size() == 1 or dist.get_rank() == 0


def ranks_of(model: nn.Module) -> Ranks:
    """The process groups of a wrapped or sharded model.

    Raises ValueError for a model that is sharded by DeepSpeed, in several ways, or over some of the processes.
    """
    if isinstance(model, DistributedDataParallel):
        return Ranks(data=model.process_group)
    sharded, parallel = bool(fsdp_modules(model)), getattr(unwrap(model), "_tp_size", None) is not None
    if any(hasattr(p, "ds_id") for p in model.parameters()) or (sharded and parallel):  # DeepSpeed sets ds_id
        raise ValueError(
            "this model is sharded by DeepSpeed or in several ways at once: calibrate it before sharding, and save it"
        )
    if not (sharded or parallel):
        return ONE_PROCESS
    if parallel and not shards_heads(unwrap(model)):
        return ONE_PROCESS  # each rank has all heads, and computes the same
    mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    if parallel:
        return Ranks(heads=mesh.get_group())
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            "this model is sharded over a part of the processes: calibrate it before sharding, and save it"
        )
    return Ranks(data=dist.group.WORLD)


def full_tensor(parameter: Tensor) -> Tensor:
    """A gain or bias with all shards; every rank must call this."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def copy_into(parameter: nn.Parameter, value: Tensor) -> None:
    """Copy a full gain or bias, or the part of this rank's heads, into a parameter that may be sharded."""
    value = value.to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
    elif value.shape == parameter.shape:
        parameter.copy_(distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements))
    else:
        parameter.to_local().copy_(value)


def unwrap(model: nn.Module) -> Any:
    """The transformers model inside DistributedDataParallel and PEFT's wrapper."""
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    return unwrap_peft(inner)


def gather_batches(batches: list[dict[str, Tensor]], max_tokens: int, ranks: Ranks) -> list[dict[str, Tensor]]:
    """The batches of all ranks, up to `max_tokens` tokens: the first of each rank, then the second of each, ….

    This restores the order before accelerate or `DistributedSampler` split the data. If all ranks have the same
    batches, these are returned once.
    """
    if ranks.data is None:
        return ranks.broadcast(batches)
    shards: list[Batches] = [[] for _ in range(dist.get_world_size(ranks.data))]
    dist.all_gather_object(shards, [{key: x.cpu() for key, x in batch.items()} for batch in batches], ranks.data)
    if all(_equal(shard, shards[0]) for shard in shards):
        return batches
    found: list[dict[str, Tensor]] = []
    tokens = 0
    for batch in (b for turn in zip_longest(*shards) for b in turn if b is not None):
        if tokens >= max_tokens:
            break
        found.append(batch)
        tokens += token_count(batch)
    return found


@torch.no_grad()
def broadcast_attention(model: nn.Module, ranks: Ranks) -> None:
    """Copy the first rank's attention parameters and powers to the other ranks' copies of the model."""
    if ranks.data is None or fsdp_modules(model):
        return
    for layer in patched_layers(model).values():
        for tensor in layer.parameters():
            dist.broadcast(tensor.data, group=ranks.data, group_src=0)
    for norm in every_norm(unwrap(model)):
        norm.knee.copy_(ranks.broadcast(norm.knee.cpu()))


def _all_reduce(x: Tensor, group: Any) -> Tensor:
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
