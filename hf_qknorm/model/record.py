"""The record of a calibration on a patched model: its report as JSON data, and samples of the weights it was made of.

A save writes the record beside the weights. It is marked stale if the weights or the scheme have changed since the
measurement. A sample of a tensor is a digest of 64 of its elements or fewer. Reading them takes a fraction of a second,
but a sharded tensor is gathered first. Training, merging an adapter or quantising changes some of them. Elements are
also digested as rounded to bfloat16 and float16, so that a cast is no change.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import cached_file

from hf_qknorm.files.atomic_io import replace_text
from hf_qknorm.files.names import REPORT
from hf_qknorm.files.untrusted import check_finite
from hf_qknorm.model.in_memory import InMemoryName
from hf_qknorm.reports.report import Calibration

ATTRIBUTE: Final = "qk_norm_record"  # of a patched model
PLACES: Final = 64  # elements in a sample, evenly spread over the tensor
HUB_OPTIONS: Final = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

Samples = Mapping[str, str]  # a tensor's digests, separated by spaces, by its name
logger = logging.getLogger("hf_qknorm")


def set_record(model: Any, report: Mapping[str, Any]) -> None:
    """Record a report of the model's present weights on it; every rank of a sharded model must call this."""
    setattr(model, ATTRIBUTE, {**report, "weights": sample_all(own_tensors(model))})


def record_of(model: Any) -> dict[str, Any] | None:
    """Return the model's record, if it has one."""
    record: dict[str, Any] | None = vars(model).get(ATTRIBUTE)
    return record


def drop_record(model: Any) -> None:
    """Remove the model's record, if it has one."""
    vars(model).pop(ATTRIBUTE, None)


def write_record(model: Any, folder: Path, state_dict: Mapping[str, Any] | None, writes: bool) -> None:
    """Write the model's record into `folder`, or remove the report of an earlier model there.

    `state_dict` has the tensors that are saved; None stands for the model's own; a sharded model needs all of them
    ranks. `writes` is whether this rank writes files.
    """
    record = record_of(model)
    if record is None or model.config.saves_as_base:
        if writes:
            (folder / REPORT).unlink(missing_ok=True)
        return
    tensors = model.state_dict() if state_dict is None else state_dict
    is_other = record["scheme"] != model.config.qk_norm
    stale = {"stale": True} if is_changed(record["weights"], tensors) or is_other else {}
    if not writes:
        return
    data = {key: value for key, value in record.items() if key != "stale"} | stale
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / REPORT, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def load_record(model: Any, name: Any, options: Mapping[str, Any]) -> None:
    """Take up the record beside the weights of the checkpoint `name`, a folder or a Hub name, if there is one.

    `options` are the arguments of `from_pretrained`. A report without samples, of an older version, gets samples of the
    loaded weights. A report with unknown fields, or with numbers that are not finite, is left out with a warning: the
    model's next save would pass it on.
    """
    if name is None or isinstance(name, InMemoryName):
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
        record = Calibration.load(found).to_dict()
        check_finite(record, f"{found}: report")
    except (OSError, ValueError) as error:
        logger.warning("the calibration report is left out: %s", error)
        return
    setattr(model, ATTRIBUTE, {**record, "weights": record.get("weights") or sample_all(own_tensors(model))})


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict, shared ones once."""
    named = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: tensor for name, tensor in named.items() if first[id(tensor)] == name}


def sample_all(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the samples of tensors, except offloaded and quantised ones."""
    samples = {name: sample(tensor) for name, tensor in tensors.items()}
    return {name: digests for name, digests in samples.items() if digests}


def is_changed(samples: Samples, tensors: Mapping[str, Any]) -> bool:
    """Whether a sampled tensor is missing or differs by more than a cast. Offloaded tensors don't count."""
    for name, digests in samples.items():
        tensor = tensors.get(name)
        if isinstance(tensor, Tensor) and tensor.is_meta:
            continue
        if tensor is None or sample(tensor).partition(" ")[0] not in digests.split():
            return True
    return not samples


@torch.no_grad()
def sample(tensor: Tensor) -> str:
    """Return digests of a few elements as they are, and rounded; empty for a tensor that is offloaded or quantised."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:  # a state dict may hold other data too
        return ""
    tensor = tensor.detach()
    if tensor.element_size() == 1:  # 8-bit floats have no indexing
        tensor = tensor.view(torch.uint8)
    count = min(tensor.numel(), PLACES)
    places = torch.arange(count, device=tensor.device) * (tensor.numel() - 1) // max(count - 1, 1)
    values = tensor[torch.unravel_index(places, tensor.shape)] if tensor.dim() else tensor[None]
    rounded = [values := values.cpu()]
    if values.is_floating_point():
        narrower = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if dtype != values.dtype]
        rounded += [values.to(dtype) for dtype in narrower]
    digests = (blake2b(x.double().numpy().tobytes(), digest_size=6).hexdigest() for x in rounded)
    return " ".join(dict.fromkeys(digests))
