"""The calibration report beside a checkpoint, compared with the checkpoint's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hf_qknorm.checkpoint.safetensors_files import DTYPES, Weights
from hf_qknorm.files.names import INDEX, REPORT, SINGLE
from hf_qknorm.model.record import is_changed
from hf_qknorm.reports.report import Calibration


def current_report(folder: Path, weights: Weights | None = None) -> Calibration | None:
    """Return the report in `folder`, marked as stale if other weights were measured; None without one.

    `weights` are by default the folder's; without any, the report's own mark counts. Reads 64 elements of each
    tensor. Raises ValueError, naming the file, for a report or weights that can't be read.
    """
    if not (folder / REPORT).is_file():
        return None
    try:
        report = Calibration.load(folder / REPORT)
    except ValueError as error:
        raise ValueError(
            f"{error}. Remove the file, or write a new one with `hf-qknorm card FOLDER --texts FILE`"
        ) from error
    if weights is None and ((folder / SINGLE).is_file() or (folder / INDEX).is_file()):
        weights = Weights(folder)
    if report.stale or not report.weights or weights is None:
        return report
    # The model's names, which a few model types do not store: a tensor under another name is not compared.
    known = {name: digests for name, digests in report.weights.items() if name in weights}
    readable = {name: weights.mapped(name) for name in known if weights.stored[name].dtype in DTYPES}
    return replace(report, stale=is_changed(known, readable))
