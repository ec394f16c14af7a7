"""How much memory a process may take, and where the weights of a checkpoint go that does not fit into it.

Weights without a place in memory stay on the disk: accelerate reads each layer's from the safetensors when its turn
comes in a forward pass, and drops them again.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from hf_qknorm.files.formatting import format_bytes
from hf_qknorm.files.paths import check_space

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

SEQUENCES = 8  # at most in a forward pass of a model that is in memory
MOST_SEQUENCES = 64  # at most in one that reads weights from the disk: more of them cost little more
ROOM = 0.9  # of the memory that is free: the rest is for others, and for what is not counted here
UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
                "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]I?B)?", re.IGNORECASE)
_CGROUPS: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 2**60  # version 1 of cgroups states a number next to 2⁶³ instead of "max"


@dataclass(frozen=True)
class Placement:
    """Where a checkpoint's weights go: `options` of `from_pretrained`.

    `sequences` is how many a forward pass is to take at most; None where there is room enough for the usual ones.
    """

    options: dict[str, Any]
    sequences: int | None = None


def parse_size(size: int | str, name: str = "max_memory") -> int:
    """Bytes, from a number of them or a text such as "8GB" (10⁹ each) or "8GiB" (2³⁰ each).

    Raises ValueError, naming the argument `name`, for anything else and for 0.
    """
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is not None:
        size = int(float(found[1]) * UNITS[(found[2] or "").upper()])
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < _UNLIMITED:
        raise ValueError(f'{name}={size!r} is no size of memory: expected bytes, or a text such as "8GB" or "500MiB"')
    return size


def memory_left(max_memory: int | str | None) -> int:
    """Bytes that this process may still take: `max_memory` less what it holds, or what is free, whichever is less.

    Free is the least of what the machine, the cgroups (version 1 and 2) and the process's own limits leave.

    Raises ValueError for a `max_memory` that is no size, or that the process holds already.
    """
    left = _free()
    if max_memory is None:
        return left
    most, held = parse_size(max_memory), psutil.Process().memory_info().rss
    if most <= held:
        raise ValueError(
            f"max_memory={max_memory!r} is less than the {format_bytes(held)} that this process holds already"
        )
    return min(most - held, left)


def _free() -> int:
    return int(min([psutil.virtual_memory().available, *_cgroup_rooms(), *_process_limits()]))


def _process_limits() -> list[int]:
    """Bytes that the process's own limits on address space and data leave, where there are any."""
    if resource is None:
        return []
    held = psutil.Process().memory_info()
    used = {resource.RLIMIT_AS: held.vms, resource.RLIMIT_DATA: getattr(held, "data", held.rss)}
    most = {kind: resource.getrlimit(kind)[0] for kind in used}
    return [max(most[kind] - used[kind], 0) for kind in used if most[kind] != resource.RLIM_INFINITY]


def _cgroup_rooms(process: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> list[int]:
    """Bytes that each memory cgroup of this process and those above it leave; cached files count as free."""
    rooms = []
    for line in process.read_text(encoding="utf-8").splitlines() if process.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            room = _room(folder, *names)
            rooms += [] if room is None else [room]
            if folder == top:
                break
    return rooms


def _room(folder: Path, limit: str, usage: str, cached: str) -> int | None:
    """Bytes that a cgroup leaves; None for one without a limit, or that can't be read."""
    try:
        most, used = ((folder / name).read_text(encoding="ascii").strip() for name in (limit, usage))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    if most == "max" or int(most) >= _UNLIMITED:
        return None
    return max(int(most) - int(used) + int(stat.get(cached, 0)), 0)


@contextmanager
def place_weights(source: Source, length: int, left: int, scratch: Path) -> Iterator[Placement]:
    """Where the weights of a checkpoint go, to calibrate it on sequences of `length` tokens in `left` bytes of memory.

    What fits goes to the GPUs, if there are any, then into memory; the rest stays in the safetensors. Weights that
    transformers computes with in another form than it stores (experts, in most models that have them) are written into
    a temporary folder beside `scratch` on loading, which is gone afterwards.

    Raises ValueError where the largest tensor and one sequence do not fit, OSError where the disk has no room.
    """
    if getattr(source.config, "quantization_config", None) is not None:  # its size in memory is the quantiser's
        yield Placement({"device_map": "auto"} if torch.cuda.is_available() else {})
        return
    size, most = source.weights.size, int(ROOM * left)
    gpus = {place: int(ROOM * free) for place, free in _gpus().items()}
    fits = (n for n in _down_from(SEQUENCES) if size + working_memory(source, n, length) <= sum(gpus.values()) + most)
    in_memory = next(fits, None)
    sequences = in_memory or _sequences(source, length, most)
    host = max(most - working_memory(source, sequences, length), 0)
    options: dict[str, Any] = {"device_map": "auto", "max_memory": {**gpus, "cpu": host}}
    if in_memory is not None:
        yield Placement(options if gpus else {}, sequences if sequences < SEQUENCES else None)
        return
    _check_mappable(source.weights)
    with scratch_folder(scratch) as folder:
        if _converts(source):
            check_space(folder, size, f"{source.name}, in the form that transformers computes with,")
        yield Placement({**options, "offload_folder": str(folder)}, sequences)


def _gpus() -> dict[int, int]:
    """The free memory of each CUDA device."""
    if not torch.cuda.is_available():
        return {}
    return {place: size for place, size in get_max_memory().items() if isinstance(place, int)}


def _sequences(source: Source, length: int, most: int) -> int:
    """How many sequences a forward pass takes that reads all weights: as many as a third of the memory holds."""
    largest = max(tensor.size for tensor in source.weights.stored.values())
    least = largest + working_memory(source, 1, length)
    if least > most:
        raise ValueError(
            f"{source.name}: {format_bytes(most)} of memory are left, too little for this checkpoint: its largest "
            f"tensor and one sequence of {length} tokens take {format_bytes(least)}. Raise max_memory, or use a larger "
            "machine"
        )
    many = (n for n in _down_from(MOST_SEQUENCES) if 3 * working_memory(source, n, length) <= most)
    return next(many, 1)


def _down_from(most: int) -> list[int]:
    """The powers of two up to `most`, which is one, the largest first."""
    return [most >> i for i in range(most.bit_length())]


def working_memory(source: Source, sequences: int, length: int) -> int:
    """About how many bytes a forward pass of a calibration takes beside the weights, rather too many than too few.

    The logits of the model as it is and unpatched, and those of one sequence in float32; of one layer, hidden states,
    attention logits, and what is summed of queries and keys in float64.
    """
    config = source.config.get_text_config()
    vocabulary, hidden = getattr(config, "vocab_size", 0), config.hidden_size
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    attention = 2 * 4 * config.num_attention_heads * length + 8 * 8 * hidden
    token = (2 * vocabulary + 12 * hidden + 4 * inner) * _itemsize(source.weights) + attention
    return sequences * length * token + 5 * 4 * length * vocabulary


def _itemsize(weights: Weights) -> int:
    """Bytes of a number of the largest tensor."""
    largest = max(weights.stored.values(), key=lambda tensor: tensor.size)
    return DTYPES[largest.dtype].itemsize if largest.dtype in DTYPES else 4


def _check_mappable(weights: Weights) -> None:
    """Raise ValueError where the process's own limits do not let it map the files: they count maps as memory."""
    limits = _process_limits()
    largest = max((weights.folder / file).stat().st_size for file in weights.files)
    if limits and min(limits) < weights.size + 2 * largest:
        raise ValueError(
            f"{weights.folder}: reading these weights from the disk maps their files, {format_bytes(weights.size)} of "
            f"address space, and the limits of this process leave {format_bytes(min(limits))}, which count maps as "
            "memory (ulimit -v, ulimit -d). Lift them, and give max_memory (--max-memory) instead"
        )


def _converts(source: Source) -> bool:
    """Whether transformers stores some of the weights in another form than it computes with."""
    with torch.device("meta"):
        model = source.model_class(copy.deepcopy(source.config))
    return any(isinstance(each, WeightConverter) for each in get_model_conversion_mapping(model))
