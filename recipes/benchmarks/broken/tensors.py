"""Edits of the weights: tensors, and headers of safetensors files."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from broken.edits import Edit, read_config

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SIZE_OF = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
           "F8_E4M3": 1, "F8_E5M2": 1, "F4": 1, "U64": 8, "bogus": 4}  # fmt: skip
GAINS = ("q_norm", "k_norm", "v_norm")
SAID = ("norm", "gain", "qk_norm", "blend")  # what a message may call a tensor of the scheme
LENGTHS = (0, 1, 7, 100, 2**20, 2**32, 2**63, 2**64 - 1)
NUMBERS = (-1, 0, 1, 7, 2**31, 2**63, 2**64 - 1, 10**30, 0.5, "8", None)
METADATA = ({"format": "tf"}, {"format": "bogus"}, {}, None, {"a": 1}, [], "pt", {"format": "pt", "x": [1]})
Tensors = dict[str, tuple[str, list[int], bytes]]  # dtype, shape, data


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors") if path.is_file())


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file, and its data; without checks, as `write`."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensors(path: Path) -> Tensors:
    header, data = read(path)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: (x["dtype"], x["shape"], data[slice(*x["data_offsets"])]) for name, x in entries.items()}


def put(path: Path, content: Tensors) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, (dtype, shape, data) in content.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + len(data)]}
        place += len(data)
    write(path, header, b"".join(data for _, _, data in content.values()))


def where(folder: Path, name: str) -> Path | None:
    """Return the file of a tensor; None without one, or if it cannot be read any more."""
    for file in files(folder):
        try:
            if name in read(folder / file)[0]:
                return folder / file
        except ValueError:
            continue
    return None


def on_tensor(name: str, change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    """Change the tensors of the file that holds `name`, and the index accordingly."""

    def apply(folder: Path) -> None:
        path = where(folder, name)
        if path is None:
            return
        content = tensors(path)
        change(content)
        put(path, content)
        if (folder / INDEX).is_file():
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


def names(folder: Path, gains: bool) -> list[str]:
    """Return the tensors of a checkpoint: the gains of the scheme, or all others."""
    found = sorted(name for file in files(folder) for name in tensors(folder / file))
    return [name for name in found if bool({*GAINS} & {*name.split(".")}) is gains]


def parts(name: str) -> tuple[str, ...]:
    """Return a tensor's names in messages: its own, its module, and the parts that no other tensor has."""
    return (name, name.rpartition(".")[0], *(part for part in name.split(".") if "_" in part))


def changed_tensor(name: str, draw: Random) -> Edit:
    """Remove a tensor, rename it, change its shape or dtype, or add another beside it."""
    dtype = draw.choice(("I8", "BOOL", "F8_E4M3", "I32", "F16", "BF16", "F64", "U8", "I64"))

    def cast(old: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
        count = len(data) // SIZE_OF[old]
        return dtype, shape, recast(data, dtype) or (data * 2)[: count * SIZE_OF[dtype]]

    def longer(old: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
        size = shape[-1] if shape else 1
        return old, [*shape[:-1], size + 1], (data * 2)[: len(data) // size * (size + 1)]

    replaced: dict[str, Callable[..., tuple[str, list[int], bytes]]] = {
        f"of {dtype}": cast,
        "of another shape": longer,
        "of shape [1]": lambda old, shape, data: (old, [1], data[: SIZE_OF[old]]),
        "with a dimension more": lambda old, shape, data: (old, [1, *shape], data),
        "empty": lambda old, shape, data: (old, [0], b""),
        "with a last one": lambda old, shape, data: (old, [*shape, 1], data),
    }
    ways: dict[str, Callable[[Tensors], object]] = {
        **{way: lambda content, f=f: content.update({name: f(*content[name])}) for way, f in replaced.items()},
        "dropped": lambda content: content.pop(name),
        "renamed": lambda content: content.update({f"{name}s": content.pop(name)}),
        "twice": lambda content: content.update({f"model.{name}": content[name]}),
    }
    way = draw.choice((*sorted(ways), "dropped"))
    return Edit(f"{name} {way}", on_tensor(name, ways[way]), parts(name))


def tensor(folder: Path, draw: Random) -> Edit:
    """Change a tensor that any model has."""
    return changed_tensor(draw.choice(names(folder, gains=False)), draw)


def gain(folder: Path, draw: Random) -> Edit | None:
    """Change a tensor of the scheme, remove all of them, or add one that the scheme does not have."""
    if "qk_norm" not in read_config(folder):
        return None
    own, way = names(folder, gains=True), draw.random()
    knees = [name for name in own if name.endswith(".eps")]
    if knees and way < 0.25:
        name, value = draw.choice(knees), draw.choice((math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-12, 2.5))
        stored = {name: ("F32", [], struct.pack("<f", value))}
        return Edit(f"{name} = {value}", on_tensor(name, lambda content: content.update(stored)), parts(name))
    if own and way < 0.7:
        edit = changed_tensor(draw.choice(own), draw)
        return Edit(edit.text, edit.apply, (*edit.names, *SAID))
    if own and way < 0.85:
        drops = [on_tensor(name, lambda content, name=name: content.pop(name)) for name in own]
        names_said = (*parts(own[0].rpartition(".")[0]), *SAID)
        return Edit("no gains at all", lambda folder: [drop(folder) for drop in drops], names_said)
    example = next((name for name in own if name.endswith(".weight")), "model.layers.0.self_attn.q_norm.weight")
    changes = (
        ("q_norm.weight", "v_norm.bias"),
        ("weight", "blend"),
        ("weight", "eps"),
        (".0.", ".9."),
        ("q_norm", "knee"),
    )
    new = example.replace(*draw.choice(changes))
    if new in own:
        return None
    more = {new: ("F32", [8], b"\0\0\x80\x3f" * 8)}
    beside = draw.choice(names(folder, gains=False))
    return Edit(f"{new} added", on_tensor(beside, lambda content: content.update(more)), (*parts(new), "norm"))


def header(folder: Path, draw: Random) -> Edit:
    """Break a safetensors file: its bytes, or the lengths, offsets, dtypes, shapes or names in its header."""
    there = files(folder)
    file = draw.choice(there)
    name = draw.choice(sorted(name for name, (_, shape, _) in tensors(folder / file).items() if shape))
    length, share, number, metadata = draw.choice(LENGTHS), draw.random(), draw.choice(NUMBERS), draw.choice(METADATA)
    dtype, place = draw.choice(sorted(SIZE_OF)), draw.randrange(2)
    of_bytes: dict[str, Callable[[bytes], bytes]] = {
        "a byte short": lambda raw: raw[:-1],
        "8 bytes more": lambda raw: raw + b"\0" * 8,
        "zeros": lambda raw: bytes(len(raw)),
        "empty": lambda raw: b"",
        "no JSON": lambda raw: raw[:8] + b"x" * 64 + raw[72:],
        "a pickle": lambda raw: b"\x80\x04\x95" + raw,
        "a Git LFS pointer": lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "an error page": lambda raw: b"<!DOCTYPE html><title>404</title>",
        f"length {length}": lambda raw: length.to_bytes(8, "little") + raw[8:],
        f"truncated to {share:.0%}": lambda raw: raw[: int(len(raw) * share)],
        f"{name} twice": lambda raw: named_twice(raw, name),
    }
    of_entry: dict[str, Callable[[dict[str, Any]], object]] = {
        "offsets overlap": lambda entry: entry.update(data_offsets=[0, 4]),
        "offsets swapped": lambda entry: entry["data_offsets"].reverse(),
        "offsets missing": lambda entry: entry.pop("data_offsets"),
        "dtype 3": lambda entry: entry.update(dtype=3),
        "shape turned": lambda entry: entry["shape"].reverse(),
        f"an offset {number!r}": lambda entry: entry["data_offsets"].__setitem__(place, number),
        f"dtype {dtype}": lambda entry: entry.update(dtype=dtype),
        f"shape {number!r}": lambda entry: entry.update(shape=number),
        f"a size {number!r}": lambda entry: entry["shape"].__setitem__(0, number),
    }
    way = draw.choice((*sorted(of_bytes), *sorted(of_entry), "metadata"))

    def apply(folder: Path) -> None:
        left = files(folder)
        path = where(folder, name) if way in of_entry else None
        path = path or (folder / left[there.index(file) % len(left)] if left else None)
        if path is None:
            return
        if way in of_bytes:
            path.write_bytes(of_bytes[way](path.read_bytes()))
            return
        content, data = read(path)
        if way == "metadata":
            content["__metadata__"] = metadata
        else:
            of_entry[way](content[name if name in content else next(x for x in content if x != "__metadata__")])
        write(path, content, data)

    said = f"metadata {metadata!r}" if way == "metadata" else f"{name}: {way}" if way in of_entry else way
    return Edit(f"{file}: {said}", apply, (*parts(name), ".safetensors"))


def named_twice(raw: bytes, name: str) -> bytes:
    """Give a header a second entry of a name."""
    end = 8 + int.from_bytes(raw[:8], "little")
    again = f',"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}'.encode()
    text = raw[8:end].rstrip().removesuffix(b"}") + again
    return len(text).to_bytes(8, "little") + text + raw[end:]
