"""The memory that a process may take, and the placement of a checkpoint's weights in it.

Weights that do not fit stay on the disk: in each forward pass accelerate reads a layer's weights from the safetensors
files before the layer runs, and drops them afterwards.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped] # accelerate depends on it
import torch
from accelerate.utils import get_max_memory
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from hf_qknorm.checkpoint.safetensors_files import DTYPES, Weights
from hf_qknorm.checkpoint.source import Source
from hf_qknorm.files.atomic_io import scratch_folder
from hf_qknorm.files.formatting import format_bytes, shorten
from hf_qknorm.files.paths import check_space

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

SEQUENCES = 8  # at most in a forward pass of a model in memory
MOST_SEQUENCES = 64  # at most in a forward pass that reads weights from the disk, where more cost little more
USABLE = 0.9  # of the free memory: the rest is for other processes, and for what is not counted here
UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
                "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]I?B)?", re.IGNORECASE)
_CGROUPS: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 2**60  # cgroups of version 1 write a number near 2⁶³ instead of "max"


def parse_size(size: int | str) -> int:
    """Return a size in bytes, from a number or a text such as "8GB" (10⁹ bytes each) or "8GiB" (2³⁰ each).

    Raises ValueError for anything else and for 0.
    """
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    number: float = 0
    if found is not None:
        number = float(found[1]) * UNITS[(found[2] or "").upper()]
    elif isinstance(size, int) and not isinstance(size, bool):
        number = size
    if not 1 <= number < _UNLIMITED:
        raise ValueError(
            f'max_memory={shorten(size)} is no size of memory: expected bytes, or a text such as "8GB" or "500MiB"'
        )
    return int(number)


def memory_left(max_memory: int | str | None) -> int:
    """Return the bytes that this process may still take: the free memory, and at most `max_memory` in all.

    Machine, cgroups (version 1 and 2) and the process's own limits count. Raises ValueError for a `max_memory` that is
    no size, or that the process uses already.
    """
    left = int(min([psutil.virtual_memory().available, *_cgroup_limits(), *_process_limits()]))
    if max_memory is None:
        return left
    most, held = parse_size(max_memory), psutil.Process().memory_info().rss
    if most <= held:
        raise ValueError(
            f"max_memory={shorten(max_memory)} is less than the {format_bytes(held)} that this process holds already"
        )
    return min(most - held, left)


def _process_limits() -> list[int]:
    """Return the bytes that the process's own limits on address space and data leave, if it has any."""
    if resource is None:
        return []
    held = psutil.Process().memory_info()
    used = {resource.RLIMIT_AS: held.vms, resource.RLIMIT_DATA: getattr(held, "data", held.rss)}
    most = {kind: resource.getrlimit(kind)[0] for kind in used}
    return [max(most[kind] - used[kind], 0) for kind in used if most[kind] != resource.RLIM_INFINITY]


def _cgroup_limits(process: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> list[int]:
    """Return the bytes that each memory cgroup of this process and its parents leave; cached files count as free."""
    limits: list[int | None] = []
    for line in process.read_text(encoding="utf-8").splitlines() if process.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        folders = [folder for folder in (group, *group.parents) if folder.is_relative_to(top)]
        limits += [_left_in_cgroup(folder, *names) for folder in folders]
    return [limit for limit in limits if limit is not None]


def _left_in_cgroup(folder: Path, limit: str, usage: str, cached: str) -> int | None:
    """Return the bytes that a cgroup leaves; None if it has no limit, or can't be read."""
    try:
        most, used = ((folder / name).read_text(encoding="ascii").strip() for name in (limit, usage))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    if most == "max" or int(most) >= _UNLIMITED:
        return None
    return max(int(most) - int(used) + int(stat.get(cached, 0)), 0)


@contextmanager
def place_weights(source: Source, length: int, left: int, scratch: Path) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Place a checkpoint's weights for forward passes of `length` tokens in `left` bytes of memory.

    Yields options of `from_pretrained`, and the most sequences of a forward pass if few fit. Weights go to the GPUs
    first, then into memory; the rest stays on the disk. If transformers converts weights when it loads them (as most
    experts), it writes the layers that stay on the disk into a temporary folder beside `scratch`.

    Raises ValueError if the largest tensor and one sequence do not fit, OSError if the disk is too small.
    """
    if getattr(source.config, "quantization_config", None) is not None:  # the quantiser decides on the size in memory
        yield {"device_map": "auto"} if torch.cuda.is_available() else {}, None
        return
    size, most = source.weights.nbytes, int(USABLE * left)
    devices = get_max_memory() if torch.cuda.is_available() else {}
    gpus = {device: int(USABLE * free) for device, free in devices.items() if isinstance(device, int)}
    fits = (n for n in _down_from(SEQUENCES) if size + working_memory(source, n, length) <= sum(gpus.values()) + most)
    in_memory = next(fits, None)
    sequences = in_memory or _sequences(source, length, most)
    host = max(most - working_memory(source, sequences, length), 0)
    options: dict[str, Any] = {"device_map": "auto", "max_memory": {**gpus, "cpu": host}}
    if in_memory is not None:
        yield options if gpus else {}, sequences if sequences < SEQUENCES else None
        return
    _check_mappable(source.weights)
    with scratch_folder(scratch) as folder:
        with torch.device("meta"):
            conversions = get_model_conversion_mapping(source.model_class(copy.deepcopy(source.config)))
        if any(isinstance(each, WeightConverter) for each in conversions):  # stored tensors are joined or split
            check_space(folder, size, f"{source.name}, in the form that transformers computes with,")
        yield {**options, "offload_folder": str(folder)}, sequences


def _sequences(source: Source, length: int, most: int) -> int:
    """Return the sequences of a forward pass that reads weights from the disk: as many as a third of `most` holds."""
    least = max(tensor.nbytes for tensor in source.weights.stored.values()) + working_memory(source, 1, length)
    if least > most:
        raise ValueError(
            f"{source.name}: {format_bytes(most)} of memory are left, too little for this checkpoint: its largest "
            f"tensor and one sequence of {length} tokens take {format_bytes(least)}. Raise max_memory, or use a larger "
            "machine"
        )
    return next((n for n in _down_from(MOST_SEQUENCES) if 3 * working_memory(source, n, length) <= most), 1)


def _down_from(most: int) -> list[int]:
    """Return the powers of two from `most`, itself one, down to 1."""
    return [most >> i for i in range(most.bit_length())]


def working_memory(source: Source, sequences: int, length: int) -> int:
    """Estimate, from above, the bytes of a calibration's forward pass beside the weights.

    They are the logits of the patched and the unpatched model, and of one sequence in float32; and of one layer the
    hidden states, the attention logits, and float64 sums over queries and keys.
    """
    config = source.config.get_text_config()
    vocabulary, hidden = getattr(config, "vocab_size", 0), config.hidden_size
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    attention = 2 * 4 * config.num_attention_heads * length + 8 * 8 * hidden
    largest = max(source.weights.stored.values(), key=lambda tensor: tensor.nbytes)
    itemsize = DTYPES[largest.dtype].itemsize if largest.dtype in DTYPES else 4
    token = (2 * vocabulary + 12 * hidden + 4 * inner) * itemsize + attention
    return sequences * length * token + 5 * 4 * length * vocabulary


def _check_mappable(weights: Weights) -> None:
    """Raise ValueError if the process's own limits, which count mapped files as memory, are too low for the files."""
    limits = _process_limits()
    largest = max((weights.folder / file).stat().st_size for file in weights.files)
    if limits and min(limits) < weights.nbytes + 2 * largest:
        raise ValueError(
            f"{weights.folder}: reading these weights from the disk maps their files, {format_bytes(weights.nbytes)} "
            f"of address space, and the limits of this process leave {format_bytes(min(limits))}, which count maps as "
            "memory (ulimit -v, ulimit -d). Lift them, and give max_memory (--max-memory) instead"
        )
