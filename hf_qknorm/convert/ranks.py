"""Calibration under DistributedDataParallel: all ranks see all ranks' data, and end with the first one's result."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_qknorm.attention import patched_layers
from hf_qknorm.convert.report import Calibration

Batches = list[dict[str, Tensor]]


def unwrapped(model: nn.Module) -> Any:
    """The transformers model within DistributedDataParallel and PEFT's wrapper."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return model.get_base_model() if isinstance(model, PeftModel) else model


def group_of(model: nn.Module) -> Any:
    """The processes that share a model wrapped for them, or None."""
    return model.process_group if isinstance(model, DistributedDataParallel) else None


def gathered(batches: Batches, max_tokens: int, group: Any) -> Batches:
    """The batches of all ranks: each one's first, then each one's second, … of up to `max_tokens` tokens.

    That is the order from which accelerate and `DistributedSampler` dealt them. Where all ranks have the same, once.
    """
    shards: list[Batches] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(shards, [{key: x.cpu() for key, x in batch.items()} for batch in batches], group)
    if all(_equal(shard, shards[0]) for shard in shards):
        return batches
    found: Batches = []
    seen = 0
    for batch in (b for turn in zip_longest(*shards) for b in turn if b is not None):
        if seen >= max_tokens:
            break
        found.append(batch)
        seen += batch["input_ids"].numel()
    return found


@torch.no_grad()
def from_first(model: nn.Module, report: Calibration, group: Any) -> Calibration:
    """Put the first rank's attention parameters into every rank's model, and return its report."""
    for layer in patched_layers(model).values():
        for parameter in layer.parameters():
            dist.broadcast(parameter.data, group=group, group_src=0)
    box = [report]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def _equal(one: Batches, other: Batches) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(one, other, strict=True)
    )
