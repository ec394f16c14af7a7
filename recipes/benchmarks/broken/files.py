"""Edits of files: their bytes, what stands in their place, the index and second layouts; and harmless edits."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from broken.edits import CONFIG, Edit, can_be_read, read_config
from broken.tensors import INDEX, SINGLE, Tensors, files, put, read, tensors, write

Change = Callable[[bytes], bytes]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
OTHER = (*TOKENIZER, "generation_config.json")
ELSEWHERE = ("../model.safetensors", "/etc/passwd", "a/b.safetensors", "", "bogus.safetensors", ".", "a\0b", 3, None,
             [], "config.json", "model-00001-of-00099.safetensors", "x" * 300)  # fmt: skip
TOO_LARGE = 2**30  # of a file with a hole, which takes no space on the disk


def rewriting(name: str, change: Change) -> Callable[[Path], None]:
    """Rewrite the bytes of a file, if it exists."""

    def apply(folder: Path) -> None:
        path = folder / name
        if can_be_read(path):
            path.write_bytes(change(path.read_bytes()))

    return apply


def as_json(change: Callable[[Any], Any]) -> Change:
    """Change the content of a file of JSON."""
    return lambda data: json.dumps(change(json.loads(data))).encode()


def texts(draw: Random) -> dict[str, Change]:
    """Ways to spoil a file of JSON as text: invalid, of another kind, or in another encoding."""
    share, bomb = draw.random(), 10 ** draw.choice((2, 3, 5))
    return {
        f"truncated to {share:.0%}": lambda b: b[: int(len(b) * share)],
        "empty": lambda b: b"",
        "blank": lambda b: b"  \n",
        "binary": lambda b: bytes(range(256)) * 4,
        "with a byte-order mark": lambda b: b"\xef\xbb\xbf" + b,
        "UTF-16": lambda b: b.decode().encode("utf-16"),
        "Latin-1": lambda b: b.replace(b"{", b'{"\xe9": 1,', 1),
        "with NUL bytes": lambda b: b + b"\0" * 8,
        "twice": lambda b: b + b,
        "a list": lambda b: b"[" + b + b"]",
        "null": lambda b: b"null",
        "a number": lambda b: b"7",
        "a text": lambda b: b'"llama"',
        "of two brackets": lambda b: b"{}",
        f"nested {bomb} deep": lambda b: b.replace(b"{", b'{"a": ' + b"[" * bomb + b"]" * bomb + b",", 1),
        "with a comment": lambda b: b"// hello\n" + b,
        "a comma too many": lambda b: b.rstrip().removesuffix(b"}") + b",}",
        "a number of 5,000 digits": lambda b: b.replace(b"{", b'{"a": ' + b"9" * 5000 + b",", 1),
        "a lone surrogate": lambda b: b.replace(b"{", b'{"a": "\\ud800",', 1),
    }


def text(folder: Path, draw: Random) -> Edit:
    """Make config.json invalid as text or JSON, with a duplicate key, or of another kind."""
    ours = ("qk_norm", "attn_", "experts_implementation")  # which the unpatched twin does not have
    name = draw.choice(sorted(name for name in read_config(folder) if not name.startswith(ours)))
    again = f', "{name}": {64 if name == "hidden_size" else 3}}}'.encode()
    ways = {"a field twice": lambda b: b.rstrip().removesuffix(b"}") + again} | texts(draw)
    way = draw.choice(sorted(ways.keys() - {"of two brackets"}))
    return Edit(f"config.json {way}", rewriting(CONFIG, ways[way]), (CONFIG,))


def tokenizer(folder: Path, draw: Random) -> Edit:
    """Spoil, remove or change a file of the tokenizer, or the generation config."""
    name, value = draw.choice((*TOKENIZER, *OTHER)), draw.choice((None, 3, "x", [], {}, {"type": "bogus"}, -1))
    key = draw.choice(sorted(json.loads((folder / name).read_bytes())))
    ways = texts(draw) | {
        f"with {key} = {value!r}": as_json(lambda content: {**content, key: value}),
        f"without {key}": as_json(lambda content: {x: y for x, y in content.items() if x != key}),
    }
    way = draw.choice((*sorted(ways), "deleted"))
    if way == "deleted":
        return Edit(f"{name} deleted", lambda folder: (folder / name).unlink(missing_ok=True), OTHER)
    return Edit(f"{name} {way}", rewriting(name, ways[way]), (*OTHER, "tokenizer", "generation"))


def place(folder: Path, draw: Random) -> Edit:
    """Replace a file by a pipe, a link, a folder, a device, or a file that is too large or unreadable."""
    name = draw.choice(
        (CONFIG, CONFIG, *files(folder)[:2], *TOKENIZER, *([INDEX] if (folder / INDEX).is_file() else []))
    )

    def instead(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
        return lambda folder: ((folder / name).unlink(missing_ok=True), make(folder / name))

    def if_there(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
        return lambda folder: change(folder / name) if (folder / name).is_file() else None

    def outside(path: Path) -> None:
        other = path.parent.with_name(f"{path.parent.name}-outside")
        other.mkdir(exist_ok=True)
        path.rename(other / name)
        path.symlink_to(other / name)

    links = ("nothing", name, "/dev/zero", "/dev/null", ".")
    ways: dict[str, Callable[[Path], Any]] = {
        **{f"a link to {target}": instead(lambda path, target=target: path.symlink_to(target)) for target in links},
        "a pipe": instead(os.mkfifo),
        "a link to a file elsewhere": if_there(outside),
        "a folder": instead(Path.mkdir),
        "a folder with a file": instead(lambda path: (path.mkdir(), (path / name).touch())),
        "a file of a GiB": if_there(lambda path: os.truncate(path, TOO_LARGE)),
        "a file that may not be read": if_there(lambda path: path.chmod(0)),
        "the folder may not be listed": lambda folder: folder.chmod(0o100),
    }
    way = draw.choice(sorted(ways))
    whole = way.startswith("the folder")
    names = ("src",) if whole else (name,)
    return Edit(way if whole else f"{name}: {way}", ways[way], names, unprivileged="may not" in way)


def harmless(folder: Path, draw: Random) -> Edit:
    """Break nothing: other files beside it, other whitespace and orders, unused fields, links within the folder."""

    def linked(folder: Path) -> None:
        path = folder / files(folder)[0]
        (folder / ".kept").mkdir()
        path.rename(folder / ".kept" / path.name)
        path.symlink_to(Path(".kept") / path.name)

    def header(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            path = folder / files(folder)[-1]
            content, data = read(path)
            write(path, change(content), data)

        return apply

    def padded(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        return (size + 64).to_bytes(8, "little") + data[8 : 8 + size] + b" " * 64 + data[8 + size :]

    ways: dict[str, Callable[[Path], Any]] = {
        "other files beside it": lambda folder: [(folder / name).write_text("{}") for name in ("notes.txt", "a.json")],
        "a folder beside it": lambda folder: shutil.copytree(folder, folder / "checkpoint-1"),
        "a pipe beside it": lambda folder: os.mkfifo(folder / "pipe"),
        "training_args.bin": lambda folder: (folder / "training_args.bin").write_bytes(b"\x80\x04"),
        "config.json in another order": rewriting(CONFIG, as_json(lambda c: dict(sorted(c.items(), reverse=True)))),
        "a field that nobody reads": rewriting(CONFIG, as_json(lambda c: c | {"nobody_reads_this": [1, {"a": None}]})),
        "a license with a BOM": lambda folder: (folder / "LICENSE").write_bytes(b"\xef\xbb\xbfApache-2.0"),
        "weights through a link within": linked,
        "a header with spaces": lambda folder: rewriting(files(folder)[0], padded)(folder),
        "more metadata": header(lambda h: {**h, "__metadata__": {"format": "pt", "made by": "é"}}),
        "a header in another order": header(lambda h: dict(sorted(h.items(), reverse=True))),
        "another total_size": rewriting(INDEX, as_json(lambda i: i | {"metadata": {"total_size": 0, "a": "b"}})),
    }
    way = draw.choice(sorted(ways))
    return Edit(way, ways[way], harmless=True)


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
