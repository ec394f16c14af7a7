"""One of two processes that share a model, a checkpoint with a batch in `<gain>`.

Rank 0 writes `parallel.safetensors` into that folder: logits, and every gradient, whole. The model is saved to `saved`.
"""

from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from qknorm_tests.distributed_run import whole


def main(gain: str, root: str) -> None:
    folder = Path(root, gain)
    batch = load_file(folder / "batch.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    result = model(**batch)
    result.loss.backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters()}
    found["logits"] = whole(result.logits)
    model.save_pretrained(folder / "saved")
    if dist.get_rank() == 0:
        save_file(found, folder / "parallel.safetensors")
