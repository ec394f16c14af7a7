"""Edits of safetensors headers: lengths, offsets, dtypes, shapes, names, metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from broken.edits import Edit
from broken.stored import SIZE_OF, files, read, tensors, where, write
from broken.weights import parts

LENGTHS = (0, 1, 7, 100, 2**20, 2**32, 2**63, 2**64 - 1)
NUMBERS = (-1, 0, 1, 7, 2**31, 2**63, 2**64 - 1, 10**30, 0.5, "8", None)
METADATA = ({"format": "tf"}, {"format": "bogus"}, {}, None, {"a": 1}, [], "pt", {"format": "pt", "x": [1]})
BYTES: dict[str, Callable[[bytes], bytes]] = {  # what a file's bytes become
    "a byte short": lambda raw: raw[:-1],
    "8 bytes more": lambda raw: raw + b"\0" * 8,
    "zeros": lambda raw: bytes(len(raw)),
    "empty": lambda raw: b"",
    "no JSON": lambda raw: raw[:8] + b"x" * 64 + raw[72:],
    "a pickle": lambda raw: b"\x80\x04\x95" + raw,
    "a Git LFS pointer": lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "an error page": lambda raw: b"<!DOCTYPE html><title>404</title>",
}
ENTRY: dict[str, Callable[[dict[str, Any]], Any]] = {  # what becomes of a tensor's entry
    "offsets overlap": lambda entry: entry.update(data_offsets=[0, 4]),
    "offsets swapped": lambda entry: entry["data_offsets"].reverse(),
    "offsets missing": lambda entry: entry.pop("data_offsets"),
    "dtype 3": lambda entry: entry.update(dtype=3),
    "shape turned": lambda entry: entry["shape"].reverse(),
}


def header(folder: Path, draw: Random) -> Edit:
    """Give the header of a safetensors file another length, or other offsets, dtypes, shapes or names."""
    there = files(folder)
    file = draw.choice(there)
    name = draw.choice(sorted(name for name, (_, shape, _) in tensors(folder / file).items() if shape))
    change = draw.choice((_bytes, _entry, _entry, _top))
    text, broken = change(name, draw)
    of_tensor, place = change is _entry, there.index(file)

    def apply(folder: Path) -> None:
        there = files(folder)
        path = where(folder, name) if of_tensor else None
        if path is None and there:
            path = folder / there[place % len(there)]
        if path is not None:
            broken(path)

    return Edit(f"{file}: {text}", apply, (*parts(name), ".safetensors"))


def _bytes(name: str, draw: Random) -> tuple[str, Callable[[Path], None]]:
    """Edits of the whole file."""
    length, share = draw.choice(LENGTHS), draw.random()
    ways = BYTES | {
        f"length {length}": lambda raw: length.to_bytes(8, "little") + raw[8:],
        f"truncated to {share:.0%}": lambda raw: raw[: int(len(raw) * share)],
    }
    way = draw.choice(sorted(ways))
    return way, lambda path: path.write_bytes(ways[way](path.read_bytes())) and None


def _entry(name: str, draw: Random) -> tuple[str, Callable[[Path], None]]:
    """Edits of a tensor's entry."""
    number, dtype, place = draw.choice(NUMBERS), draw.choice(sorted(SIZE_OF)), draw.randrange(2)
    ways = ENTRY | {
        f"an offset {number!r}": lambda entry: entry["data_offsets"].__setitem__(place, number),
        f"dtype {dtype}": lambda entry: entry.update(dtype=dtype),
        f"shape {number!r}": lambda entry: entry.update(shape=number),
        f"a size {number!r}": lambda entry: entry["shape"].__setitem__(0, number),
    }
    way = draw.choice(sorted(ways))

    def broken(path: Path) -> None:
        header, data = read(path)
        others = (key for key in header if key != "__metadata__")
        ways[way](header[name if name in header else next(others)])  # a twin has no gains
        write(path, header, data)

    return f"{name}: {way}", broken


def _top(name: str, draw: Random) -> tuple[str, Callable[[Path], None]]:
    """Edits of the metadata, or a duplicate name."""
    metadata = draw.choice((*METADATA, "twice", "twice"))

    def twice(path: Path) -> None:
        raw = path.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        again = f',"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}'.encode()
        text = raw[8:end].rstrip().removesuffix(b"}") + again
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])

    def described(path: Path) -> None:
        header, data = read(path)
        write(path, header | {"__metadata__": metadata}, data)

    return (f"{name} twice", twice) if metadata == "twice" else (f"metadata {metadata!r}", described)
