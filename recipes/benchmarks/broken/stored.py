"""The bytes of safetensors files and their index: read, changed and written without checks."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SIZE_OF = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
           "F8_E4M3": 1, "F8_E5M2": 1, "F4": 1, "U64": 8, "bogus": 4}  # fmt: skip
Tensors = dict[str, tuple[str, list[int], bytes]]  # dtype, shape, data


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors") if path.is_file())


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file, and its data."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensors(path: Path) -> Tensors:
    header, data = read(path)
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def put(path: Path, content: Tensors) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place, blobs = 0, []
    for name, (dtype, shape, data) in content.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + len(data)]}
        place += len(data)
        blobs.append(data)
    write(path, header, b"".join(blobs))


def where(folder: Path, name: str) -> Path | None:
    """Return the file of a tensor; None without one, or if it cannot be read any more."""
    for file in files(folder):
        try:
            if name in read(folder / file)[0]:
                return folder / file
        except ValueError:
            continue
    return None


def on_tensor(name: str, change: Callable[[Tensors], None], listed: bool | None = None) -> Callable[[Path], None]:
    """Change the tensors of the file that holds `name`; `listed=False` also removes it from the index."""

    def apply(folder: Path) -> None:
        path = where(folder, name)
        if path is None:
            return
        content = tensors(path)
        change(content)
        put(path, content)
        if listed is not None and (folder / INDEX).is_file():
            index = json.loads((folder / INDEX).read_text())
            index["weight_map"] = {key: file for key, file in index["weight_map"].items() if file != path.name}
            index["weight_map"] |= dict.fromkeys(content, path.name)
            (folder / INDEX).write_text(json.dumps(index))

    return apply


def recast(data: bytes, dtype: str) -> bytes | None:
    """Convert F32 data to another floating-point dtype; None for a dtype that is not floating-point."""
    values = struct.unpack(f"<{len(data) // 4}f", data)
    if dtype == "BF16":
        return b"".join(data[place + 2 : place + 4] for place in range(0, len(data), 4))
    letter = {"F16": "e", "F64": "d"}.get(dtype)
    return struct.pack(f"<{len(values)}{letter}", *values) if letter else None
