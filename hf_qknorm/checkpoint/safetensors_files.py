"""The safetensors files of a checkpoint: headers read and checked, and files rewritten one tensor at a time.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length, a JSON header, then the tensors'
bytes without gaps. Its library writes files from tensors in memory; here, unchanged tensors are copied
from file to file.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.names import INDEX, SINGLE
from hf_qknorm.files.progress import progress_bar
from hf_qknorm.files.untrusted import read_json

INDEX_BYTES = 256 * 2**20  # a million tensors
SHARD = re.compile(r"[\w][\w. -]{0,240}\.safetensors")  # a file name on every system, never a path
CHUNK = 16 * 2**20  # bytes in memory at a time
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its dtype as the format names it, its shape, and its bytes from `begin` to `end`."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def is_floating_point(self) -> bool:
        """Whether the dtype is floating point of at least 16 bits, unlike a quantiser's codes."""
        return self.dtype in DTYPES and DTYPES[self.dtype].is_floating_point


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written into `file`; `make` computes it just before."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


Tensors = Mapping[str, StoredTensor | NewTensor]


class Weights:
    """The tensors of a checkpoint folder by name. Opening it reads the headers, and checks files and index.

    If a folder holds both a single file and an index of shards, the single file is read, as transformers does.

    Raises FileNotFoundError for missing weights or shards; ValueError, naming the file, for a truncated or corrupted
    file, or one that does not match the index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata: dict[str, dict[str, str]] = {}
        self.stored: dict[str, StoredTensor] = {}
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

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor. Raises ValueError for a quantised one, whose dtype torch can't compute with."""
        stored = self.stored[name]
        if stored.dtype not in DTYPES:
            raise ValueError(f"{self.folder / stored.file}: {name} is stored as {stored.dtype}: dequantise it first")
        return DTYPES[stored.dtype]

    def read(self, name: str) -> Tensor:
        """Read a tensor into memory."""
        with safe_open(self.folder / self.stored[name].file, framework="pt") as file:
            return file.get_tensor(name)

    def mapped(self, name: str) -> Tensor:
        """Return a tensor whose elements are read from the file when they are used; its dtype is one of `DTYPES`."""
        stored = self.stored[name]
        if not stored.nbytes:
            return torch.empty(stored.shape, dtype=self.dtype(name))
        path, size = self.folder / stored.file, (stored.nbytes,)
        data = np.memmap(path, np.uint8, "c", stored.begin, size)  # a writable copy, as torch asks for
        return torch.from_numpy(data).view(self.dtype(name)).view(stored.shape)

    @property
    def parameters(self) -> int:
        """Number of elements of all tensors."""
        return sum(torch.Size(stored.shape).numel() for stored in self.stored.values())

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.stored.values())

    def rewrite(self, folder: Path, tensors: Tensors) -> None:
        """Write `tensors`, stored here or new, into `folder`, in the same files.

        At most one new tensor is in memory at a time. Raises OSError, naming the file, if it can't be written.
        """
        size = sum(tensor.nbytes for tensor in tensors.values())
        with progress_bar(total=size, desc="weights", unit="B", unit_scale=True) as bar:
            for file in self.files:
                plan = {name: tensor for name, tensor in tensors.items() if tensor.file == file}
                try:
                    self._write(folder / file, file, plan, bar)
                except OSError as error:
                    raise OSError(error.errno, error.strerror or str(error), str(folder / file)) from error
        if self.index is not None:
            metadata = self.index.get("metadata", {}) | {"total_size": size}
            metadata.pop("total_parameters", None)
            weight_map = {name: tensor.file for name, tensor in sorted(tensors.items())}
            text = json.dumps(self.index | {"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n"
            (folder / INDEX).write_text(text, encoding="utf-8")

    def _write(self, path: Path, file: str, plan: Tensors, bar: Any) -> None:
        def order(name: str) -> tuple[int, int, str]:
            itemsize = plan[name].nbytes // max(torch.Size(plan[name].shape).numel(), 1)
            return -itemsize, getattr(plan[name], "begin", 0), name

        plan = {name: plan[name] for name in sorted(plan, key=order)}  # widest dtypes first, as in the library: aligned
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **self.metadata[file]}}
        place = 0
        for name, tensor in plan.items():
            dtype = _NAMES[tensor.dtype] if isinstance(tensor, NewTensor) else tensor.dtype
            header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [place, place + tensor.nbytes]}
            place += tensor.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with (self.folder / file).open("rb") as source, path.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name, tensor in plan.items():
                if isinstance(tensor, NewTensor):
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
            with path.open("rb") as raw, safe_open(path, framework="pt"):  # the library checks header and file length
                length = int.from_bytes(raw.read(8), "little")
                header = json.loads(raw.read(length))
        except PermissionError:
            raise
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or corrupted ({shorten(str(error))}): download it again") from error
        self.metadata[file] = header.pop("__metadata__", None) or {}
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if name in self.stored:
                raise ValueError(f"{path}: {name} is in {self.stored[name].file} too: the checkpoint mixes two saves")
            self.stored[name] = StoredTensor(file, entry["dtype"], tuple(entry["shape"]), begin, end)

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
    """Read the index of a sharded checkpoint; None if there is a single file, which transformers prefers."""
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


def _bytes(name: str, new: NewTensor) -> memoryview:
    """Return a tensor's bytes, without a copy if it is on the CPU in its dtype already."""
    tensor = new.make().detach().to(device="cpu", dtype=new.dtype)
    if tuple(tensor.shape) != new.shape:
        raise ValueError(f"{name} was made with shape {list(tensor.shape)}, expected {list(new.shape)}")
    if not tensor.isfinite().all():
        dtype = str(new.dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} would hold NaN or infinity in {dtype}: nothing was written. Look for NaN in the weights; a "
            "checkpoint in float32 has room for larger numbers"
        )
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _copy(source: BinaryIO, out: BinaryIO, begin: int, end: int, bar: Any) -> None:
    """Copy bytes between files, inside the operating system's kernel if it can."""
    out.flush()
    source.seek(begin)
    while begin < end:
        count = min(CHUNK, end - begin)
        try:
            copied = os.copy_file_range(source.fileno(), out.fileno(), count, offset_src=begin)
        except (AttributeError, OSError) as error:  # not on this system, or not between these file systems
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise
            source.seek(begin)
            copied = out.write(source.read(count))
            out.flush()
        if not copied:
            raise OSError(errno.EIO, f"{source.name} ended early")
        begin += copied
        bar.update(copied)
