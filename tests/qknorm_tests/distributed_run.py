"""One of two processes that train a model together: data-parallel, sharded by FSDP2, and through accelerate.

Rank 0 writes the results into the folder. In some tasks they train by QuacK and QKClip.
"""

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from accelerate.utils.launch import prepare_multi_gpu_env
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hf_qknorm import QKClip, QuacK, Scheme, patch_model, peft_modules_to_save
from qknorm_tests.kneed import knees_of
from qknorm_tests.tables import make_batch, randomise, sharp_model
from qknorm_tests.tiny import tiny_model

NORMED = Scheme(q="rms", k="layer", v="rms", bias=True, softcap=5.0)
CASES: dict[str, tuple[str, Scheme]] = {
    "shared": ("llama", NORMED),
    "per head": ("gpt2", Scheme(q="layer", k="rms", v="rms", gain="per_head", bias=True, softcap=5.0)),
    "scalar": ("llama", Scheme(q="l2", k="l2", gain="scalar", scale=1.0)),
    "sinks": ("gpt_oss", NORMED),
}
FSDP2_YAML = Path(__file__).parents[2] / "recipes" / "accelerate" / "fsdp2.yaml"
WORLD = 2
STEPS = 4
RULED: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1},  # two shards divide the one key head
    "gpt2": {},
    "deepseek_v3": {"first_k_dense_replace": 2},
}
RULED_WAYS = ("DDP", "FSDP2", "FSDP2, resumed")


def made(case: str) -> PreTrainedModel:
    model_type, scheme = CASES[case]
    return randomise(patch_model(sharp_model(model_type), scheme), knee=4.0).eval()


def adapted() -> nn.Module:
    """A model with an adapter and trained copies of its norms."""
    model = made("shared")
    torch.manual_seed(0)
    config = LoraConfig(r=4, init_lora_weights=False, modules_to_save=peft_modules_to_save(model))
    return get_peft_model(model, config).eval()


def ruled(model_type: str) -> PreTrainedModel:
    """A model with large logits, in fp64, so that errors exceed rounding."""
    return patch_model(tiny_model(model_type, initializer_range=0.3, **RULED[model_type]), "none").double()


def rules(model: nn.Module) -> tuple[QuacK, QKClip]:
    return QuacK(torch.optim.SGD(model.parameters(), 0.5, momentum=0.9), model), QKClip(model, threshold=3.0)


def train(model: Any, by: tuple[QuacK, QKClip], steps: range, rows: slice) -> int:
    """Train; returns how many steps clipped."""
    (optimizer, clip), clipped = by, 0
    for step in steps:
        tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(step))[rows]
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        clipped += bool(clip.step())
        optimizer.zero_grad()
    return clipped


def backward(model: Any, rank: int) -> Tensor:
    """The loss of this rank's row of the batch, after the backward pass."""
    loss = model(**{name: rows[rank : rank + 1] for name, rows in make_batch("plain").items()}).loss
    loss.backward()
    return loss.detach()


def whole(tensor: Any) -> Tensor:
    """A tensor whose parts lie with several ranks, or that each rank has."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().contiguous()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}


def sharded(model: Any) -> Any:
    """Shard by FSDP2, with a group per layer and one for the rest."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.get_submodule(next(n for n, m in model.named_modules() if isinstance(m, nn.ModuleList))):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def accelerated(model: nn.Module) -> Any:
    """Shard as `accelerate launch --config_file fsdp2.yaml` does, whose Accelerator needs GPUs."""
    arguments = launch_command_parser().parse_args(["--config_file", str(FSDP2_YAML), "train.py"])
    with mock.patch.dict(os.environ, prepare_multi_gpu_env(_validate_launch_command(arguments)[0])):
        plugin = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = plugin
    return fsdp2_prepare_model(accelerator, model)


WAYS: dict[str, Callable[[Any], Any]] = {"DDP": DistributedDataParallel, "FSDP2": accelerated}


def run_case(case: str, folder: Path, rank: int) -> None:
    for way, wrap in WAYS.items():
        model = wrap(made(case))
        losses = backward(model, rank)
        dist.all_reduce(losses)
        found = {**gradients(model), "loss": losses / WORLD}
        if way != "DDP":
            state = states.get_model_state_dict(
                model, options=states.StateDictOptions(full_state_dict=True, cpu_offload=True)
            )
            if rank == 0:  # the other ranks' state is empty
                model.save_pretrained(folder / f"{case} {way}", state_dict=state, max_shard_size="20KB")
        if rank == 0:
            save_file(found, folder / f"{case} {way}.safetensors")


def run_adapter(folder: Path, rank: int) -> None:
    model = DistributedDataParallel(adapted())
    backward(model, rank)
    if rank == 0:
        save_file(gradients(model), folder / "adapter.safetensors")


def run_sent(folder: Path, rank: int) -> None:
    """Rank 1 saves the knees that rank 0 sends to a model of the meta device."""
    source = made("shared")
    with torch.device("meta"):
        model = type(source)(copy.deepcopy(source.config))
    model = sharded(model).to_empty(device="cpu")
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, {} if rank else source.state_dict(), options=options)
    if rank == 1:
        save_file(knees_of(model), folder / "sent.safetensors")


def run_ruled(model_type: str, folder: Path, rank: int) -> None:
    rows = slice(rank, rank + 1)
    for way in RULED_WAYS:
        model = ruled(model_type)
        wrapped = (DistributedDataParallel if way == "DDP" else sharded)(model)
        by = rules(model)
        train(wrapped, by, range(STEPS // 2), rows)
        if way.endswith("resumed"):
            state, first = states.get_optimizer_state_dict(model, by[0]), model
            model = wrapped = sharded(ruled(model_type))
            model.load_state_dict(first.state_dict())
            by = rules(model)
            states.set_optimizer_state_dict(model, by[0], state)
        train(wrapped, by, range(STEPS // 2, STEPS), rows)
        found = {name: whole(p).clone() for name, p in model.state_dict().items()}
        if rank == 0:
            save_file(found, folder / f"{model_type}, {way}.safetensors")


TASKS: dict[str, Callable[[Path, int], None]] = {
    "sent": run_sent,
    **{case: partial(run_case, case) for case in CASES},
    "adapter": run_adapter,
    **{model_type: partial(run_ruled, model_type) for model_type in RULED},
}


def main(task: str, folder: str) -> None:
    TASKS[task](Path(folder), dist.get_rank())
