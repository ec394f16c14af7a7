"""One of two processes that share a model, a checkpoint with a batch in `<gain>`.

Rank 0 writes `parallel.safetensors` into that folder: logits, and every gradient, whole. The model is saved to `saved`.
The task `<gain> calibrated <name>` calibrates it, and saves it to a folder of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_qknorm import calibrate
from qknorm_tests.distributed_run import CALIBRATIONS, calibration_batches, whole


def main(task: str, root: str) -> None:
    gain, _, name = task.partition(" calibrated ")
    folder = Path(root, gain)
    if name:
        calibrated(name, folder)
    else:
        computed(folder)


def computed(folder: Path) -> None:
    batch = load_file(folder / "batch.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    result = model(**batch)
    result.loss.backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters()}
    found["logits"] = whole(result.logits)
    model.save_pretrained(folder / "saved")
    if dist.get_rank() == 0:
        save_file(found, folder / "parallel.safetensors")


def calibrated(name: str, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    report = calibrate(model, calibration_batches(), **CALIBRATIONS[name])
    model.save_pretrained(folder / f"calibrated {name}")
    (folder / f"report {name} {dist.get_rank()}.json").write_text(json.dumps(report.to_dict()))
