"""Edits of the weights: tensors, headers of safetensors files, the index, and second layouts beside the first."""

from __future__ import annotations

import json
import math
import shutil
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
ELSEWHERE = ("../model.safetensors", "/etc/passwd", "a/b.safetensors", "", "bogus.safetensors", ".", "a\0b", 3, None,
             [], "config.json", "model-00001-of-00099.safetensors", "x" * 300)  # fmt: skip
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


def index(folder: Path, draw: Random) -> Edit:
    """Break the index: other files, missing tensors, a single file beside it, a missing shard."""
    share, turned, file = draw.random(), draw.random() < 0.7, draw.choice(ELSEWHERE)

    def some(index: dict[str, Any]) -> str:
        return sorted(index["weight_map"])[int(share * len(index["weight_map"]))]

    def first(index: dict[str, Any]) -> str:
        return min(index["weight_map"].values())

    on_index: dict[str, Callable[[dict[str, Any]], object]] = {
        "no weight_map": lambda index: index.pop("weight_map"),
        "an empty weight_map": lambda index: index.update(weight_map={}),
        "weight_map is a list": lambda index: index.update(weight_map=[1]),
        "metadata is a list": lambda index: index.update(metadata=[1]),
        "metadata is missing": lambda index: index.pop("metadata"),
        "another total_size": lambda index: index["metadata"].update(total_size=-1),
        "an entry too many": lambda index: index["weight_map"].update(bogus=first(index)),
        "all in one shard": lambda index: index.update(weight_map=dict.fromkeys(index["weight_map"], first(index))),
        f"a tensor in {file!r}": lambda index: index["weight_map"].__setitem__(some(index), file),
        "an entry is missing": lambda index: index["weight_map"].pop(some(index)),
    }
    on_shard: dict[str, Callable[[Path, Path], object]] = {  # one shard, and another beside it
        "a shard is missing": lambda path, other: path.unlink(),
        "a shard is another": lambda path, other: shutil.copyfile(other, path),
        "a shard is truncated": lambda path, other: path.write_bytes(path.read_bytes()[:-9]),
    }
    spoilt = {
        "empty": b"",
        "null": b"null",
        "binary": bytes(range(256)),
        "deep": b"[" * 100_000,
        "of two brackets": b"{}",
    }
    other = "the other layout beside it" + (", with other numbers" if turned else "")
    sharded = (*on_index, *on_shard, "the index is missing") if (folder / INDEX).is_file() else ()
    way = draw.choice(sorted((other, *spoilt, *sharded)))

    def apply(folder: Path) -> None:
        path, there = folder / INDEX, files(folder)
        if way == other:
            add_layout(folder, turned)
        elif way in spoilt:
            path.write_bytes(spoilt[way])
        elif way in on_index and path.is_file():
            content = json.loads(path.read_text())
            on_index[way](content)
            path.write_text(json.dumps(content))
        elif way in on_shard and len(there) > 1:
            place = int(share * len(there))
            on_shard[way](folder / there[place], folder / there[place - 1])
        elif way == "the index is missing":
            path.unlink(missing_ok=True)

    return Edit(f"the index is {way}" if way in spoilt else way, apply, ("weight_map", ".safetensors", INDEX))


def add_layout(folder: Path, turned: bool) -> None:
    """Write the weights a second time, in the other layout; with `turned`, each tensor is reversed."""
    content: Tensors = {}
    for file in files(folder):
        content |= tensors(folder / file)
    if turned:
        content = {name: (dtype, shape, data[4:] + data[:4]) for name, (dtype, shape, data) in content.items()}
    if (folder / INDEX).is_file():
        put(folder / SINGLE, content)
        return
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {name: shards[place % 2] for place, name in enumerate(content)}
    for shard in shards:
        put(folder / shard, {name: content[name] for name in content if weight_map[name] == shard})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
