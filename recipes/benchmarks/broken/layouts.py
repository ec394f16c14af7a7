"""Edits of the index of a sharded checkpoint, and second layouts of the weights beside the first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from broken.edits import Edit
from broken.stored import INDEX, SINGLE, Tensors, files, put, tensors

ELSEWHERE = ("../model.safetensors", "/etc/passwd", "a/b.safetensors", "", "bogus.safetensors", ".", "a\0b", 3, None,
             [], "config.json", "model-00001-of-00099.safetensors", "x" * 300)  # fmt: skip
TEXTS: dict[str, bytes] = {  # an index that is none
    "empty": b"",
    "null": b"null",
    "binary": bytes(range(256)),
    "nested 100,000 deep": b"[" * 100_000,
    "of two brackets": b"{}",
}
INDEXED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no weight_map": lambda index: index.pop("weight_map"),
    "an empty weight_map": lambda index: index.update(weight_map={}),
    "weight_map is a list": lambda index: index.update(weight_map=[1]),
    "metadata is a list": lambda index: index.update(metadata=[1]),
    "metadata is missing": lambda index: index.pop("metadata"),
    "another total_size": lambda index: index["metadata"].update(total_size=-1),
    "an entry too many": lambda index: index["weight_map"].update(bogus=min(index["weight_map"].values())),
    "all in one shard": lambda index: index.update(
        weight_map=dict.fromkeys(index["weight_map"], min(index["weight_map"].values()))
    ),
}
SHARDS: dict[str, Callable[[Path, Path], Any]] = {  # what becomes of one shard beside another
    "a shard is missing": lambda path, other: path.unlink(),
    "a shard is another": lambda path, other: shutil.copyfile(other, path),
    "a shard is truncated": lambda path, other: path.write_bytes(path.read_bytes()[:-9]),
    "two shards are swapped": lambda path, other: _swap(path, other),
}


def index(folder: Path, draw: Random) -> Edit:
    """Break the index: other files, missing tensors, a single file beside it, a missing shard."""
    share, turned, file = draw.random(), draw.random() < 0.7, draw.choice(ELSEWHERE)
    other = "the other layout beside it" + (", with other numbers" if turned else "")
    ways: dict[str, Callable[[Path], None]] = {other: lambda folder: _add_layout(folder, turned)}
    ways |= {f"an index that is {way}": _index_of(text) for way, text in TEXTS.items()}
    if (folder / INDEX).is_file():

        def some(index: dict[str, Any]) -> str:
            return sorted(index["weight_map"])[int(share * len(index["weight_map"]))]

        indexed = INDEXED | {
            f"a tensor in {file!r}": lambda index: index["weight_map"].__setitem__(some(index), file),
            "an entry is missing": lambda index: index["weight_map"].pop(some(index)),
        }
        ways |= {way: _on_index(change) for way, change in indexed.items()}
        ways |= {way: _on_shard(share, change) for way, change in SHARDS.items()}
        ways["the index is missing"] = lambda folder: (folder / INDEX).unlink(missing_ok=True)
    way = draw.choice(sorted(ways))
    return Edit(way, ways[way], ("weight_map", ".safetensors", INDEX))


def _on_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        if (folder / INDEX).is_file():
            index = json.loads((folder / INDEX).read_text())
            change(index)
            (folder / INDEX).write_text(json.dumps(index))

    return apply


def _on_shard(share: float, change: Callable[[Path, Path], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        there = files(folder)
        if len(there) > 1:
            place = int(share * len(there))
            change(folder / there[place], folder / there[place - 1])

    return apply


def _index_of(text: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / INDEX).write_bytes(text) and None


def _swap(first: Path, second: Path) -> None:
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def _add_layout(folder: Path, turned: bool) -> None:
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
    _index_of(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode())(folder)
