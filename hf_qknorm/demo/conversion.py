"""The demo's conversion: what it costs, what the models write, the model without its norms, and a new process."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_qknorm.calibration.calibrate import calibrate
from hf_qknorm.demo.data import CONVERSION, Batches, token_count
from hf_qknorm.demo.progress import Progress
from hf_qknorm.demo.results import Measured, conversion_table
from hf_qknorm.demo.training import mean_loss
from hf_qknorm.measure.logit_statistics import logit_statistics
from hf_qknorm.model.knees import set_knee
from hf_qknorm.patch import patch_model
from hf_qknorm.reports.report import Calibration
from hf_qknorm.scheme import Scheme
from hf_qknorm.training.logit_log import nan_as_inf
from hf_qknorm.training.removal import remove_norms

PROMPT, WRITTEN = 48, 48  # tokens that the models read and write


def convert(
    base: Any, scheme: Scheme, batches: Batches, progress: Progress
) -> tuple[dict[str, Any], dict[str, Measured], Calibration]:
    """The models "unpatched" and "calibrated", and the losses of both and of the model with fresh gains."""
    progress.stage("converting")
    converted = patch_model(copy.deepcopy(base), scheme)
    models = {"unpatched": patch_model(base, "none"), "calibrated": converted}
    measured = partial(measure, batches=batches["held_out"])
    conversion = {"unpatched": measured(models["unpatched"]), "fresh gains": measured(converted)}
    calibration = calibrate(converted, batches["calibration"])
    conversion["calibrated"] = measured(converted)
    progress.advance(CONVERSION * token_count(batches["calibration"]))
    progress.print(f"converted: {converted.config.scheme}\n{conversion_table(conversion)}")
    return models, conversion, calibration


def measure(model: Any, batches: list[Tensor]) -> Measured:
    with logit_statistics(model) as statistics:
        loss = mean_loss(model, batches)
    return Measured(loss, max((float(layer.max_logit.max()) for layer in statistics.values()), key=nan_as_inf))


def reloaded(model: Any, batch: Tensor, folder: Path) -> dict[str, Any]:
    """Load the saved checkpoint in a new process, and compare its logits with the model's."""
    with torch.no_grad():
        logits = model(input_ids=batch).logits
    with TemporaryDirectory(prefix="hf-qknorm-") as temporary:
        expected = Path(temporary, "expected.safetensors")
        save_file({"input_ids": batch, "logits": logits.contiguous()}, expected)
        arguments = [str(folder), str(expected), str(torch.get_num_threads())]
        command = [sys.executable, "-m", "hf_qknorm.demo.check_reload", *arguments]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"the saved checkpoint could not be loaded in a new process:\n{finished.stderr}")
    return json.loads(finished.stdout)


@torch.no_grad()
def texts(models: dict[str, Any], tokenizer: Any, batch: Tensor) -> dict[str, str]:
    """The beginning of the held-out text, and how each model goes on by its most likely tokens."""
    prompt = batch[:1, :PROMPT]
    options = {"do_sample": False, "max_new_tokens": WRITTEN, "pad_token_id": 0}
    found = {"prompt": tokenizer.decode(prompt[0])}
    for name, model in models.items():
        written = model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        found[name] = tokenizer.decode(written[0, prompt.shape[1] :])
    return found


def without_norms(model: Any, batches: list[Tensor]) -> str:
    """The held-out loss of a copy of the model whose norms are removed, or the reason why they can't be."""
    bare = copy.deepcopy(model)
    try:
        set_knee(bare, math.inf)
        return f"held-out loss {mean_loss(remove_norms(bare), batches):.3f}"
    except ValueError as error:
        return f"not removed: {error}"
