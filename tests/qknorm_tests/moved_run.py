"""One of two processes, started by pair.py, that gets its knees from the other; see test_moved_state_in_two_processes.

Each task writes the logits of rank 1 into the folder.
"""

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_qknorm import KneeSchedule
from hf_qknorm.model.knees import knee_of
from qknorm_tests.kneed import kneed, logits
from qknorm_tests.short_runs import trainer

STEPS = 4
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}
ZERO3 = {"stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0}


def by_ddp(folder: Path, rank: int) -> Any:
    """Rank 1 starts from another calibration."""
    model = kneed("lp", **({"knee": 0.5, "power": 3.0} if rank else {}))
    DistributedDataParallel(model)(torch.arange(8)[None])
    return model


def trained(model: Any, folder: Path, steps: int = STEPS, resume: Path | None = None, **options: Any) -> Any:
    settings = {"per_device_train_batch_size": 4, "max_steps": steps, "save_strategy": "steps", "save_steps": 2}
    run = trainer(model, folder, KneeSchedule(share=0.75, target=1.0), **settings, **options)
    run.train(resume_from_checkpoint=None if resume is None else str(resume))
    return run


def run_schedule(folder: Path, rank: int, load: Callable[[], Any], **options: Any) -> None:
    """A run with a KneeSchedule, saved, and resumed from its middle: both end with the same knee and weights."""
    run = trained(load(), folder / "whole", **options)
    run.save_model(str(folder / "whole" / "end"))
    again = trained(load(), folder / "parts", **options)
    resumed = trained(load(), folder / "parts", resume=folder / "parts" / "checkpoint-2", **options)
    resumed.save_model(str(folder / "parts" / "end"))
    found = [knee_of(one.accelerator.unwrap_model(one.model)) for one in (run, again, resumed)]
    (folder / f"knees {rank}.json").write_text(json.dumps(found))


def by_zero(folder: Path, rank: int, stage: int) -> None:
    import deepspeed

    communication: Any = importlib.import_module("deepspeed.comm.torch")
    communication.build_shm_op = lambda: None  # else it compiles an operator for a minute
    deepspeed.init_distributed("gloo")
    if rank == 0:
        kneed().save_pretrained(folder / "converted")
    dist.barrier()
    config = {**ZERO, "zero_optimization": {"stage": stage, **(ZERO3 if stage == 3 else {})}}
    arguments = TrainingArguments(
        folder / "first", use_cpu=True, deepspeed=config, report_to=[]
    )  # from_pretrained sees it
    assert arguments.hf_deepspeed_config is not None
    run_schedule(folder, rank, lambda: AutoModelForCausalLM.from_pretrained(folder / "converted"), deepspeed=config)


TASKS: dict[str, Callable[[Path, int], Any]] = {
    "ddp": by_ddp,
    "zero2": lambda folder, rank: by_zero(folder, rank, 2),
    "zero3": lambda folder, rank: by_zero(folder, rank, 3),
}


def main(task: str, folder: str) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank()), "RANK": str(dist.get_rank())}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place = Path(folder, task)
    place.mkdir(exist_ok=True)
    model = TASKS[task](place, dist.get_rank())
    if model is not None:
        found = logits(model.eval())
        if dist.get_rank() == 1:
            save_file({"logits": found.contiguous()}, place / "logits.safetensors")
