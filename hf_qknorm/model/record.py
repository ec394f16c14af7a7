"""The record of a calibration on a patched model: its report as JSON data, which each save writes beside the weights.

The numbers are those of the measurement at the conversion. Training does not change them, nor does a save.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn
from transformers.utils import cached_file

from hf_qknorm.files.atomic_io import replace_text
from hf_qknorm.files.log import logger
from hf_qknorm.files.names import REPORT
from hf_qknorm.files.untrusted import check_finite
from hf_qknorm.reports.report import Calibration

ATTRIBUTE: Final = "qk_norm_record"  # of a patched model
HUB_OPTIONS: Final = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def set_record(model: Any, report: Mapping[str, Any]) -> None:
    """Record a report on the model that was measured."""
    setattr(model, ATTRIBUTE, dict(report))


def record_of(model: Any) -> dict[str, Any] | None:
    """Return the model's record, if it has one."""
    record: dict[str, Any] | None = vars(model).get(ATTRIBUTE)
    return record


def drop_record(model: Any) -> None:
    """Remove the model's record, if it has one."""
    vars(model).pop(ATTRIBUTE, None)


def write_record(model: Any, folder: Path) -> None:
    """Write the model's record into `folder`, or remove the report of an earlier model there."""
    record = record_of(model)
    if record is None:
        (folder / REPORT).unlink(missing_ok=True)
        return
    replace_text(folder / REPORT, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def load_record(model: Any, name: Any, options: Mapping[str, Any]) -> None:
    """Take up the record beside the weights of the checkpoint `name`, a folder or a Hub name, if there is one.

    `options` are the arguments of `from_pretrained`. A report of another scheme, with unknown fields, or with numbers
    that are not finite, is left out with a warning: the model's next save would pass it on.
    """
    if name is None:
        return
    found = cached_file(
        name,
        REPORT,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _commit_hash=getattr(model.config, "_commit_hash", None),
        **{key: options[key] for key in HUB_OPTIONS if key in options},
    )
    if found is None:
        return
    try:
        report = Calibration.load(found)
        if report.scheme != getattr(model.config, "scheme", report.scheme):
            raise ValueError(f"{found} has the scheme {report.scheme}, and config.json has {model.config.scheme}")
        record = report.to_dict()
        check_finite(record, f"{found}: report")
    except (OSError, ValueError) as error:
        logger.warning("the calibration report is left out: %s", error)
        return
    set_record(model, record)


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict, shared ones once."""
    named = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: tensor for name, tensor in named.items() if first[id(tensor)] == name}
