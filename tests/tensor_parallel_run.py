"""What each of two processes does that share models.

Rank 0 writes `parallel.safetensors` into each folder: logits, and every gradient, whole. The model is saved to `saved`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_qknorm  # noqa: F401


def whole(tensor: Any) -> torch.Tensor:
    """A tensor whose parts lie with several ranks, or that each rank has."""
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().contiguous()


def main(*paths: str) -> None:
    torch.set_num_threads(1)
    for folder in map(Path, paths):
        batch = load_file(folder / "batch.safetensors")
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
        result = model(**batch)
        result.loss.backward()
        found = {name: whole(p.grad) for name, p in model.named_parameters()}
        found["logits"] = whole(result.logits)
        model.save_pretrained(folder / "saved")
        if dist.get_rank() == 0:
            save_file(found, folder / "parallel.safetensors")
        dist.barrier()
    dist.destroy_process_group()
