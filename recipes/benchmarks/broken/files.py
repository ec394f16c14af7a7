"""Edits of whole files: their bytes, their JSON, and what stands in their place; and harmless edits."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from broken.edits import CONFIG, Edit, can_be_read, read_config
from broken.tensors import INDEX, files, read, write

Change = Callable[[bytes], bytes]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
OTHER = (*TOKENIZER, "generation_config.json")
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
