"""Checkpoints and reports for the tests of model cards."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard

from hf_qknorm import Calibration, calibrate, patch_model
from qknorm_tests.tiny import tiny_model

REPORT = "qk_norm_report.json"


def checkpoint(
    folder: Path, scheme: Any = "qk_norm_cap", family: str = "llama", report: bool = True, knee: float | None = None
) -> Path:
    """Save a patched checkpoint with its calibration report; return the folder."""
    model = patch_model(tiny_model(family, initializer_range=0.2), scheme)
    if report:
        generator = torch.Generator().manual_seed(0)
        batches = [torch.randint(3, 64, (2, 20), generator=generator) for _ in range(3)]
        calibrate(model, batches, knee=knee).save(folder / REPORT)
    model.save_pretrained(folder)
    return folder


def front(text: str) -> dict[str, Any]:
    """The front matter of a card as huggingface_hub reads it."""
    return ModelCard(text).data.to_dict()


def edit(folder: Path, **changes: Any) -> Calibration:
    """Change fields of the report; return the new report."""
    report = dataclasses.replace(Calibration.load(folder / REPORT), **changes)
    report.save(folder / REPORT)
    return report
