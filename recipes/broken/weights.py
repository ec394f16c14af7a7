"""What breaks the weights: headers, tensors, gains, the index, one layout beside another."""

from __future__ import annotations

import json
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
Tensors = dict[str, tuple[str, list[int], bytes]]  # dtype, shape, data


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors") if path.is_file())


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its data."""
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
    """The file that holds a tensor; None where none does, or it can't be read any more."""
    for file in files(folder):
        try:
            if name in read(folder / file)[0]:
                return folder / file
        except ValueError:
            continue
    return None


def on_tensor(name: str, change: Callable[[Tensors], None], listed: bool | None = None) -> Callable[[Path], None]:
    """Change the tensors of the file that holds `name`; `listed` False takes it out of the index, too."""

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


def names(folder: Path, gains: bool) -> list[str]:
    """The tensors of a checkpoint: the gains of the scheme, or all others."""
    found = sorted(name for file in files(folder) for name in tensors(folder / file))
    return [name for name in found if bool({*GAINS} & {*name.split(".")}) is gains]


def parts(name: str) -> tuple[str, ...]:
    """How a message may name a tensor: whole, by its module, or by a part that is one tensor's alone."""
    return (name, name.rpartition(".")[0], *(part for part in name.split(".") if "_" in part))


def recast(data: bytes, dtype: str) -> bytes | None:
    """F32 data in another floating dtype; None for what is none."""
    values = struct.unpack(f"<{len(data) // 4}f", data)
    if dtype == "BF16":
        return b"".join(data[place + 2 : place + 4] for place in range(0, len(data), 4))
    letter = {"F16": "e", "F64": "d"}.get(dtype)
    return struct.pack(f"<{len(values)}{letter}", *values) if letter else None


def changed_tensor(name: str, draw: Random, gains: bool) -> Edit:
    """A tensor dropped, of another shape or dtype, under another name, or with another beside it."""
    dtype = draw.choice(("I8", "BOOL", "F8_E4M3", "I32", "F16", "BF16", "F64", "U8", "I64"))
    way = draw.choice(("dropped", "dropped", "dtype", "shape", "one", "renamed", "twice", "flat", "empty", "rows"))

    def change(content: Tensors) -> None:
        old, shape, data = content[name]
        count = len(data) // SIZE_OF[old]
        if way in ("dropped", "renamed"):
            kept = content.pop(name)
            if way == "renamed":
                content[f"{name}s"] = kept
        elif way == "dtype":
            content[name] = dtype, shape, recast(data, dtype) or (data * 2)[: count * SIZE_OF[dtype]]
        elif way == "shape":
            content[name] = old, [*shape[:-1], shape[-1] + 1], (data * 2)[: len(data) // shape[-1] * (shape[-1] + 1)]
        elif way == "one":
            content[name] = old, [1], data[: SIZE_OF[old]]
        elif way == "flat":
            content[name] = old, [1, *shape], data
        elif way == "empty":
            content[name] = old, [0], b""
        elif way == "rows":
            content[name] = old, [*shape, 1], data
        else:
            content[f"model.{name}"] = content[name]

    text = {"dtype": f"of {dtype}", "one": "of shape [1]", "flat": "with a dimension more", "rows": "with a last one"}
    said = (*parts(name), *(() if not gains else ("norm", "gain", "qk_norm", "blend")))
    return Edit(f"{name} {text.get(way, way)}", on_tensor(name, change, listed=False), said)


def tensor(folder: Path, draw: Random) -> Edit:
    """A tensor that any model has is changed."""
    return changed_tensor(draw.choice(names(folder, gains=False)), draw, gains=False)


def gain(folder: Path, draw: Random) -> Edit | None:
    """A tensor of the scheme is changed, or all of them are dropped, or one is there that the scheme does not have."""
    own = names(folder, gains=True)
    way = draw.random()
    if own and way < 0.7:
        return changed_tensor(draw.choice(own), draw, gains=True)
    if own and way < 0.85:
        layer = own[0].rpartition(".")[0]

        def drop_all(folder: Path) -> None:
            for name in own:
                on_tensor(name, lambda content, name=name: content.pop(name), listed=False)(folder)  # type: ignore[misc]

        return Edit("no gains at all", drop_all, (*parts(layer), "norm", "gain", "qk_norm", "blend"))
    beside = draw.choice(names(folder, gains=False))
    config = read_config(folder)
    if "qk_norm" not in config:
        return None
    example = own[0] if own else "model.layers.0.self_attn.q_norm.weight"
    new = draw.choice(
        (
            example.replace("q_norm.weight", "v_norm.bias"),
            example.replace("weight", "blend"),
            example.replace(".0.", ".9."),
            example.replace("q_norm", "knee"),
        )
    )
    if new in own:
        return None
    change = lambda content: content.__setitem__(new, ("F32", [8], b"\0\0\x80\x3f" * 8))  # noqa: E731
    return Edit(f"{new} added", on_tensor(beside, change, listed=True), (*parts(new), "norm"))


def header(folder: Path, draw: Random) -> Edit:
    """The header of a safetensors file says another length, other offsets, dtypes, shapes or names."""
    file = draw.choice(files(folder))
    content, _ = read(folder / file)
    name = draw.choice(sorted(key for key in content if key != "__metadata__"))
    dtype = draw.choice(sorted(SIZE_OF))
    number = draw.choice((-1, 0, 1, 7, 2**31, 2**63, 2**64 - 1, 10**30, 0.5, "8", None))
    lengths = (0, 1, 7, 100, 2**20, 2**32, 2**63, 2**64 - 1)
    length = draw.choice(lengths)
    share = draw.random()

    def entry(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
        def apply(path: Path) -> None:
            header, data = read(path)
            others = (key for key in header if key != "__metadata__")
            change(header[name if name in header else next(others)])  # a twin has no gains
            write(path, header, data)

        return apply

    def doubled(path: Path) -> None:
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        text = raw[8 : 8 + size].rstrip()
        text = text.removesuffix(b"}") + f',"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}'.encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])

    def whole(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
        return lambda path: path.write_bytes(change(path.read_bytes())) and None

    def metadata(value: Any) -> Callable[[Path], None]:
        def apply(path: Path) -> None:
            header, data = read(path)
            write(path, {"__metadata__": value} | {k: v for k, v in header.items() if k != "__metadata__"}, data)

        return apply

    bad = draw.choice(({"format": "tf"}, {"format": "bogus"}, {}, None, {"a": 1}, [], "pt", {"format": "pt", "x": [1]}))
    ways: dict[str, Callable[[Path], None]] = {
        f"length {length}": whole(lambda raw: length.to_bytes(8, "little") + raw[8:]),
        f"an offset of {name} {number!r}": entry(lambda e: e["data_offsets"].__setitem__(share < 0.5, number)),
        f"offsets of {name} overlap": entry(lambda e: e.update(data_offsets=[0, 4])),
        f"offsets of {name} swapped": entry(lambda e: e["data_offsets"].reverse()),
        f"offsets of {name} missing": entry(lambda e: e.pop("data_offsets")),
        f"dtype of {name} {dtype}": entry(lambda e: e.update(dtype=dtype)),
        f"dtype of {name} 3": entry(lambda e: e.update(dtype=3)),
        f"shape of {name} {number!r}": entry(lambda e: e.update(shape=number)),
        f"a size of {name} {number!r}": entry(lambda e: e["shape"].__setitem__(0, number)),
        f"shape of {name} turned": entry(lambda e: e["shape"].reverse()),
        f"{name} named twice": doubled,
        f"metadata {bad!r}": metadata(bad),
        f"truncated to {share:.0%}": whole(lambda raw: raw[: int(len(raw) * share)]),
        "a byte short": whole(lambda raw: raw[:-1]),
        "8 bytes more": whole(lambda raw: raw + b"\0" * 8),
        "zeros": whole(lambda raw: bytes(len(raw))),
        "empty": whole(lambda raw: b""),
        "no JSON": whole(lambda raw: raw[:8] + b"x" * 64 + raw[72:]),
        "a pickle": whole(lambda raw: b"\x80\x04\x95" + raw),
        "a Git LFS pointer": whole(lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "an error page": whole(lambda raw: b"<!DOCTYPE html><title>404</title>"),
    }
    way = draw.choice(sorted(ways))
    number_of = files(folder).index(file)

    def apply(folder: Path) -> None:
        at = where(folder, name) if name in way else None
        there = files(folder)
        if at is None and there:
            at = folder / there[number_of % len(there)]
        try:
            if at is not None:
                ways[way](at)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return  # broken already

    return Edit(f"{file}: {way}", apply, (*parts(name), ".safetensors"))


def index(folder: Path, draw: Random) -> Edit | None:
    """The index names other files, lacks tensors, lies beside a single file, or a shard is not there."""
    there = (folder / INDEX).is_file()
    share = draw.random()

    def on_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            if (folder / INDEX).is_file():
                index = json.loads((folder / INDEX).read_text())
                change(index)
                (folder / INDEX).write_text(json.dumps(index))

        return apply

    def some(index: dict[str, Any]) -> str:
        listed = sorted(index["weight_map"])
        return listed[int(share * len(listed))]

    def to(file: Any) -> Callable[[Path], None]:
        return on_index(lambda index: index["weight_map"].__setitem__(some(index), file))

    def all_to(file: str) -> Callable[[Path], None]:
        return on_index(lambda index: index.update(weight_map=dict.fromkeys(index["weight_map"], file)))

    def on_shard(change: Callable[[Path, Path], Any]) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            found = files(folder)
            if len(found) > 1:
                place = int(share * len(found))
                change(folder / found[place], folder / found[place - 1])

        return apply

    def junk(text: bytes) -> Callable[[Path], None]:
        return lambda folder: (folder / INDEX).write_bytes(text) and None

    def other_layout(folder: Path) -> None:
        """The weights in the other layout beside this one; they are the same, or each tensor's numbers are turned."""
        content: Tensors = {}
        for file in files(folder):
            content |= tensors(folder / file)
        if share < 0.7:
            content = {name: (dtype, shape, data[4:] + data[:4]) for name, (dtype, shape, data) in content.items()}
        if (folder / INDEX).is_file():
            put(folder / SINGLE, content)
            return
        shards = {"model-00001-of-00002.safetensors": 0, "model-00002-of-00002.safetensors": 1}
        for file, rest in shards.items():
            put(folder / file, {name: content[name] for place, name in enumerate(content) if place % 2 == rest})
        weight_map = {name: [*shards][place % 2] for place, name in enumerate(content)}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))

    ways: dict[str, Callable[[Path], None]] = {"the other layout beside it": other_layout}
    if there:
        elsewhere = ("../model.safetensors", "/etc/passwd", "a/b.safetensors", "", "bogus.safetensors", ".", "a\0b", 3,
                     None, [], "config.json", "model-00001-of-00099.safetensors", "x" * 300)  # fmt: skip
        file = draw.choice(elsewhere)
        ways |= {
            f"a tensor is said to be in {file!r}": to(file),
            "all tensors are said to be in one shard": all_to(files(folder)[0]),
            "a shard is missing": on_shard(lambda path, _: path.unlink()),
            "a shard is another": on_shard(lambda path, other: shutil.copyfile(other, path)),
            "two shards are swapped": on_shard(swap),
            "a shard is truncated": on_shard(lambda path, _: path.write_bytes(path.read_bytes()[:-9])),
            "an entry is missing": on_index(lambda index: index["weight_map"].pop(some(index))),
            "an entry too many": on_index(lambda index: index["weight_map"].update(bogus=files(folder)[0])),
            "no weight_map": on_index(lambda index: index.pop("weight_map")),
            "an empty weight_map": on_index(lambda index: index.update(weight_map={})),
            "weight_map is a list": on_index(lambda index: index.update(weight_map=[1])),
            "metadata is a list": on_index(lambda index: index.update(metadata=[1])),
            "metadata is missing": on_index(lambda index: index.pop("metadata")),
            "another total_size": on_index(lambda index: index["metadata"].update(total_size=-1)),
            "the index is missing": lambda folder: (folder / INDEX).unlink(missing_ok=True),
        }
    ways |= {
        "an index that is empty": junk(b""),
        "an index that is null": junk(b"null"),
        "an index that is binary": junk(bytes(range(256))),
        "an index nested 100,000 deep": junk(b"[" * 100_000),
        "an index of two brackets": junk(b"{}"),
    }
    way = draw.choice(sorted(ways))
    return Edit(way, ways[way], ("weight_map", ".safetensors", INDEX))


def swap(first: Path, second: Path) -> None:
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
