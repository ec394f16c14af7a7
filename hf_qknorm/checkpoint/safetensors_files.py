"""The safetensors of a checkpoint folder: looked into, checked, and rewritten without ever loading the whole.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length, a JSON header, then the tensors'
bytes without gaps. Its library writes a file from tensors in memory; here most bytes only pass through.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm.auto import tqdm

from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.names import INDEX, SINGLE
from hf_qknorm.files.untrusted import read_json

INDEX_BYTES = 256 * 2**20  # a million tensors
SHARD = re.compile(r"[\w][\w. -]{0,240}\.safetensors")  # a name of a file, on every system
CHUNK = 16 * 2**20  # bytes in memory at a time
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: its file, its dtype as the format names it, its shape, its bytes from `begin` to `end`."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.end - self.begin

    @property
    def is_floating_point(self) -> bool:
        """Whether it is of 16 bits or more, and no integer: what is not are the codes of a quantiser."""
        return self.dtype in DTYPES and DTYPES[self.dtype].is_floating_point


@dataclass(frozen=True)
class New:
    """A tensor to be written into `file`: what it will be, and how to make it when its turn comes."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Its bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def is_floating_point(self) -> bool:
        """As for `Stored`."""
        return self.dtype.is_floating_point


class Weights:
    """The tensors of a checkpoint folder by name; opening it reads the headers and checks that files are whole.

    Where a folder holds both a single file and an index of shards, the single file is read, as transformers does.

    Raises FileNotFoundError for weights or shards that are not there, ValueError, naming the file, for one that is
    truncated or corrupted, or that does not hold what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata: dict[str, dict[str, str]] = {}
        self.stored: dict[str, Stored] = {}
        self.index = _read_index(folder)
        for file in self.files:
            self._read_header(file)
        if self.index is not None:
            self._check_index(self.index["weight_map"])

    @property
    def files(self) -> list[str]:
        """The files that hold the weights."""
        return [SINGLE] if self.index is None else sorted(set(self.index["weight_map"].values()))

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def tensors(self, new: Mapping[str, New], removed: Collection[str] = ()) -> dict[str, Stored | New]:
        """The tensors that `rewrite` gives, by name."""
        return {name: stored for name, stored in self.stored.items() if name not in removed} | dict(new)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor. Raises ValueError for one that is quantised (a dtype we can't compute with)."""
        stored = self.stored[name]
        if stored.dtype not in DTYPES:
            raise ValueError(f"{self.folder / stored.file}: {name} is stored as {stored.dtype}: dequantise it first")
        return DTYPES[stored.dtype]

    def read(self, name: str) -> Tensor:
        """One tensor, in memory."""
        with safe_open(self.folder / self.stored[name].file, framework="pt") as file:
            return file.get_tensor(name)

    @property
    def parameters(self) -> int:
        """How many numbers they are."""
        return sum(torch.Size(stored.shape).numel() for stored in self.stored.values())

    @property
    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(stored.size for stored in self.stored.values())

    def rewrite(self, folder: Path, new: Mapping[str, New], removed: Collection[str] = ()) -> None:
        """Write these weights into `folder`, file by file, without `removed` and with `new` (which may replace).

        In memory at a time: one new tensor, or a chunk. Raises OSError, naming the file, if it can't be written.
        """
        tensors = self.tensors(new, removed)
        size = sum(tensor.size for tensor in tensors.values())
        with tqdm(total=size, desc="weights", unit="B", unit_scale=True, leave=False) as bar:
            for file in self.files:
                plan = {name: tensor for name, tensor in tensors.items() if tensor.file == file}
                try:
                    self._write(folder / file, file, plan, bar)
                except OSError as error:
                    raise OSError(error.errno, error.strerror or str(error), str(folder / file)) from error
        if self.index is not None:
            index = json.loads(json.dumps(self.index))
            index.setdefault("metadata", {})["total_size"] = size
            index["metadata"].pop("total_parameters", None)
            index["weight_map"] = {name: tensor.file for name, tensor in sorted(tensors.items())}
            text = json.dumps(index, indent=2) + "\n"
            (folder / INDEX).write_text(text, encoding="utf-8")

    def _write(self, path: Path, file: str, plan: Mapping[str, Stored | New], bar: Any) -> None:
        # widest dtypes first, as the library does: then every tensor is aligned
        order = sorted(plan, key=lambda name: (-_itemsize(plan[name]), _begin(plan[name]), name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **self.metadata[file]}}
        place = 0
        for name in order:
            tensor = plan[name]
            dtype = _NAMES[tensor.dtype] if isinstance(tensor, New) else tensor.dtype
            header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [place, place + tensor.size]}
            place += tensor.size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with (self.folder / file).open("rb") as source, path.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                tensor = plan[name]
                if isinstance(tensor, New):
                    data = _bytes(name, tensor)
                    out.write(data)
                    bar.update(len(data))
                else:
                    _copy(source, out, tensor.begin, tensor.end, bar)

    def _read_header(self, file: str) -> None:
        path = self.folder / file
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: {INDEX} names it. Download the checkpoint again")
        try:
            with safe_open(path, framework="pt") as opened:  # the library checks the whole header against the length
                self.metadata[file] = opened.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or corrupted ({shorten(str(error))}): download it again") from error
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(length))
        start = 8 + length
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if name in self.stored:
                raise ValueError(f"{path}: {name} is in {self.stored[name].file} too: the checkpoint mixes two saves")
            self.stored[name] = Stored(file, entry["dtype"], tuple(entry["shape"]), start + begin, start + end)

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        for name, file in weight_map.items():
            if name not in self.stored or self.stored[name].file != file:
                raise ValueError(f"{self.folder / file}: {INDEX} says that {name} is in it, but it is not")
        for name, stored in self.stored.items():
            if name not in weight_map:
                raise ValueError(
                    f"{self.folder / INDEX} has no entry for {name}, which is in {stored.file}: it would not be "
                    "loaded. Download the index again, or save the model again"
                )


def _read_index(folder: Path) -> dict[str, Any] | None:
    """The index of a sharded checkpoint; None where there is one file, which transformers prefers to an index."""
    if (folder / SINGLE).is_file():
        return None
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {SINGLE} and no {INDEX}")
    index = read_json(path, INDEX_BYTES)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f'{path} has no "weight_map" from tensors to files: download it again')
    if not isinstance(index.get("metadata", {}), dict):
        raise ValueError(f'{path}: "metadata" is {shorten(index["metadata"])}, expected a mapping')
    for name, file in weight_map.items():
        if not isinstance(file, str) or not SHARD.fullmatch(file):
            raise ValueError(
                f"{path}: {shorten(name)} is said to be in {shorten(file)}: expected a .safetensors file of this folder"
            )
    return index


def _itemsize(tensor: Stored | New) -> int:
    if isinstance(tensor, New):
        return tensor.dtype.itemsize
    count = torch.Size(tensor.shape).numel()
    return tensor.size // count if count else 0


def _begin(tensor: Stored | New) -> int:
    return tensor.begin if isinstance(tensor, Stored) else 0


def _bytes(name: str, new: New) -> memoryview:
    """A tensor's bytes, not copied again where it is on the CPU in its dtype already."""
    tensor = new.make().detach().to(device="cpu", dtype=new.dtype)
    if tuple(tensor.shape) != new.shape:
        raise ValueError(f"{name} was made with shape {list(tensor.shape)}, expected {list(new.shape)}")
    if not tensor.isfinite().all():
        dtype = str(new.dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} would hold NaN or infinity in {dtype}: nothing was written. Look for NaN in the weights; a "
            "checkpoint in float32 has room for larger numbers"
        )
    data: memoryview = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    return data


def _copy(source: BinaryIO, out: BinaryIO, begin: int, end: int, bar: Any) -> None:
    """Copy bytes from file to file, inside the kernel where it can."""
    out.flush()
    source.seek(begin)
    while begin < end:
        count = min(CHUNK, end - begin)
        try:
            copied = os.copy_file_range(source.fileno(), out.fileno(), count, offset_src=begin)
        except (AttributeError, OSError) as error:  # not this system, or not between these two file systems
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise
            source.seek(begin)
            copied = out.write(source.read(count))
            out.flush()
        if not copied:
            raise OSError(errno.EIO, f"{source.name} ended early")
        begin += copied
        bar.update(copied)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content (of a link: what it points to). Raises OSError, naming the file, if it can't be."""
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error
