"""One of two processes, started by pair.py: QuacK and QKClip, or a falling knee.

Rank 0 writes the full weights of a run into the folder, as `<model type or knee>-<way>.safetensors`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hf_qknorm import KneeSchedule, QKClip, QuacK, Scheme, patch_model, set_knee
from hf_qknorm.model.attention import patched_layers
from qknorm_tests.kneed import set_shapes
from qknorm_tests.tiny import tiny_model

THRESHOLD, STEPS = 3.0, 4
MODELS = {
    "llama": {"num_key_value_heads": 1},  # two shards divide the one key head
    "gpt2": {},
    "deepseek_v3": {"first_k_dense_replace": 2},
}


def made(model_type: str) -> PreTrainedModel:
    """A model with large logits and without dropout, in fp64, so that errors exceed rounding."""
    model = tiny_model(model_type, initializer_range=0.3, **MODELS[model_type])
    return patch_model(model, "none").double()


def rules(model: nn.Module) -> tuple[QuacK, QKClip]:
    return QuacK(torch.optim.SGD(model.parameters(), 0.5, momentum=0.9), model), QKClip(model, THRESHOLD)


def train(
    model: Any, optimizer: QuacK, clip: QKClip, steps: range, rows: slice, seen: Callable[[Any], None] = bool
) -> None:
    for step in steps:
        tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(step))[rows]
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        seen(clip.step())
        optimizer.zero_grad()


def kneed() -> PreTrainedModel:
    """A model with a knee, in fp64."""
    scheme = Scheme(q="rms", k="layer", v="rms", gain="per_head", bias=True)
    model = patch_model(tiny_model("llama", initializer_range=0.3), scheme)
    set_shapes(model, 2.0)
    return model.double()


def lower(model: Any, rows: slice) -> None:
    """Train with a knee that falls from 2 in the first step to 0 in the last."""
    schedule, optimizer = KneeSchedule(share=0.75), torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    for step in range(STEPS):
        set_knee(model, schedule.at(step, STEPS, 2.0))
        tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(step))[rows]
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def shard(model: PreTrainedModel) -> PreTrainedModel:
    mesh = init_device_mesh("cpu", (2,))
    for layer in patched_layers(model):
        fully_shard(model.get_submodule(layer.rpartition(".")[0]), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict().items()
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in state}


def by_ddp(model_type: str, rows: slice) -> nn.Module:
    model = made(model_type)
    optimizer, clip = rules(model)
    train(DistributedDataParallel(model), optimizer, clip, range(STEPS), rows)
    return model


def by_fsdp(model_type: str, rows: slice) -> nn.Module:
    model = shard(made(model_type))
    optimizer, clip = rules(model)
    train(model, optimizer, clip, range(STEPS), rows)
    return model


def by_fsdp_resumed(model_type: str, rows: slice) -> nn.Module:
    first, second = shard(made(model_type)), shard(made(model_type))
    optimizer, clip = rules(first)
    train(first, optimizer, clip, range(STEPS // 2), rows)
    second.load_state_dict(first.state_dict())
    resumed, clip = rules(second)
    set_optimizer_state_dict(second, resumed, get_optimizer_state_dict(first, optimizer))
    train(second, resumed, clip, range(STEPS // 2, STEPS), rows)
    return second


def knee_by_ddp(rows: slice) -> nn.Module:
    model = kneed()
    lower(DistributedDataParallel(model), rows)
    return model


def knee_by_fsdp(rows: slice) -> nn.Module:
    model = shard(kneed())
    lower(model, rows)
    return model


def by_fsdp1(flat: bool = False) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(kneed(), use_orig_params=not flat, device_id=torch.device("cpu"))


def knee_by_flat_shards(rows: slice) -> nn.Module:
    model = by_fsdp1(flat=True)
    lower(model, rows)
    return model


def knee_after_pass(rows: slice) -> nn.Module:
    """Set the knee after a forward pass, which leaves the root's parameters whole."""
    model = by_fsdp1()
    with torch.no_grad():
        model(torch.arange(8)[None])
    set_knee(model, 1.0)
    return model


def knee_of_whole(rows: slice) -> nn.Module:
    """Set the knee where FSDP writes the whole parameters back to the shards."""
    model = by_fsdp1()
    with FullyShardedDataParallel.summon_full_params(model):
        set_knee(model, 1.0)
    return model


WAYS = {"ddp": by_ddp, "fsdp": by_fsdp, "fsdp-resumed": by_fsdp_resumed}
KNEES = {"ddp": knee_by_ddp, "fsdp": knee_by_fsdp, "fsdp1": knee_by_flat_shards}
FSDP1 = {"pass": knee_after_pass, "whole": knee_of_whole}

RUNS: dict[str, dict[str, Callable[[slice], nn.Module]]] = {
    **{model_type: {way: partial(run, model_type) for way, run in WAYS.items()} for model_type in MODELS},
    "knee": KNEES,
    "fsdp1": FSDP1,
}


def main(task: str, folder: str) -> None:
    for way, run in RUNS[task].items():
        found = whole(run(slice(dist.get_rank(), dist.get_rank() + 1)))
        if dist.get_rank() == 0:
            save_file({key: p.contiguous() for key, p in found.items()}, Path(folder, f"{task}-{way}.safetensors"))
