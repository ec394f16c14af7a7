"""Where a model's weights are: on GPUs, in memory, or in files, from which each forward pass reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped] # accelerate depends on it
import torch
from accelerate.utils import align_module_device, convert_file_size_to_int, get_max_memory
from torch import nn

from hf_qknorm.files.formatting import shorten

USABLE: Final = 0.7  # of the free memory, for weights
MOST: Final = 2**60  # bytes
SHARD: Final = 10**9  # bytes at most, of an offloaded model: each shard is in memory while it is saved


def placement(folder: Path, max_memory: int | str | Mapping[Any, Any] | None, offload: Path) -> dict[str, Any]:
    """Return options of `from_pretrained` for the checkpoint in `folder`: weights on GPUs, in memory, or in files.

    `max_memory` limits the weights in memory, in bytes or as "8GB", or is accelerate's mapping from devices to sizes.
    By default a model goes to the GPUs first. Weights that do not fit are read from the checkpoint's own files in each
    forward pass; those that transformers converts on loading, from files that it writes into the folder `offload`.

    Raises ValueError for a size that can't be read.
    """
    if max_memory is None:
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        if not torch.cuda.is_available() and size < USABLE * psutil.virtual_memory().available:
            return {}
        return {"device_map": "auto", "offload_folder": str(offload)}
    return {"device_map": "auto", "max_memory": memory_limits(max_memory), "offload_folder": str(offload)}


def memory_limits(max_memory: int | str | Mapping[Any, Any]) -> dict[Any, int]:
    """Return the bytes that each device may hold. Raises ValueError for an invalid size, and for 0."""
    limits = dict(max_memory) if isinstance(max_memory, Mapping) else {**get_max_memory(), "cpu": max_memory}
    try:
        texts = {device: int(x) if str(x).isdecimal() else x for device, x in limits.items()}
        sizes = {device: int(convert_file_size_to_int(size)) for device, size in texts.items()}
        if not 0 < sizes["cpu"] < MOST:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f'max_memory={shorten(max_memory)} is no size of memory: expected bytes, or a text such as "8GB"'
        ) from None
    return sizes


def is_offloaded(model: Any) -> bool:
    """Return whether weights of a model stay in files."""
    return "disk" in (getattr(model, "hf_device_map", None) or {}).values()


@torch.no_grad()
def check_finite(model: nn.Module, where: object) -> None:
    """Raise ValueError, naming the first one, for a parameter with NaN or infinity, offloaded ones included."""
    for path, module in model.named_modules():
        with align_module_device(module):
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.isfinite().all():
                    raise ValueError(
                        f"{where}: {path}.{name} holds NaN or infinity, expected finite numbers: its training diverged "
                        f"(go back to an earlier checkpoint), or {parameter.dtype} has no room for it (take float32)"
                    )
