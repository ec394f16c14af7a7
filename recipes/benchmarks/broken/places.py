"""Edits of the other files and of the places of files: tokenizers, permissions, pipes, links; and harmless edits."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from broken.edits import CONFIG, Edit, on_config, rewriting
from broken.stored import INDEX, files, read, write

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
OTHER = (*TOKENIZER, "generation_config.json")
TOO_LARGE = 2**30  # of a file with a hole, which takes no space on the disk


def tokenizer(folder: Path, draw: Random) -> Edit:
    """Truncate, remove or change a file of the tokenizer, or the generation config."""
    name = draw.choice((TOKENIZER[0], TOKENIZER[1], TOKENIZER[0], TOKENIZER[1], "generation_config.json"))
    share = draw.random()
    value = draw.choice((None, 3, "x", [], {}, {"type": "bogus"}, -1))

    def within(data: bytes) -> bytes:
        content = json.loads(data)
        key = sorted(content)[int(share * len(content))]
        content[key] = value
        return json.dumps(content).encode()

    def without(data: bytes) -> bytes:
        content = json.loads(data)
        del content[sorted(content)[int(share * len(content))]]
        return json.dumps(content).encode()

    ways: dict[str, Callable[[bytes], bytes]] = {
        f"truncated to {share:.0%}": lambda b: b[: int(len(b) * share)],
        "empty": lambda b: b"",
        "binary": lambda b: bytes(range(256)),
        "null": lambda b: b"null",
        "a list": lambda b: b"[1]",
        "of two brackets": lambda b: b"{}",
        "nested 100,000 deep": lambda b: b"[" * 100_000 + b"]" * 100_000,
        "with a byte-order mark": lambda b: b"\xef\xbb\xbf" + b,
        f"with a field {value!r}": within,
        "without a field": without,
    }
    way = draw.choice((*sorted(ways), "deleted"))
    if way == "deleted":
        return Edit(f"{name} deleted", lambda folder: (folder / name).unlink(missing_ok=True), OTHER)
    return Edit(f"{name} {way}", rewriting(name, ways[way]), (*OTHER, "tokenizer", "generation"))


def place(folder: Path, draw: Random) -> Edit:
    """Replace a file by a pipe, a link, a folder, a device, or a file that is too large or unreadable."""
    weights = files(folder)
    name = draw.choice((CONFIG, CONFIG, *weights[:2], *TOKENIZER, *([INDEX] if (folder / INDEX).is_file() else [])))

    def instead(make: Callable[[Path], Any]) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            (folder / name).unlink(missing_ok=True)
            make(folder / name)

        return apply

    def too_large(path: Path) -> None:
        with path.open("r+b") as file:
            file.truncate(TOO_LARGE)

    def outside(path: Path) -> None:
        if path.is_file():
            other = path.parent.with_name(f"{path.parent.name}-outside")
            other.mkdir(exist_ok=True)
            path.rename(other / name)
            path.symlink_to(other / name)

    ways: dict[str, Callable[[Path], Any]] = {
        "a pipe": instead(os.mkfifo),
        "a link to nothing": instead(lambda path: path.symlink_to("nothing")),
        "a link to itself": instead(lambda path: path.symlink_to(path.name)),
        "a link to /dev/zero": instead(lambda path: path.symlink_to("/dev/zero")),
        "a link to /dev/null": instead(lambda path: path.symlink_to("/dev/null")),
        "a link to its folder": instead(lambda path: path.symlink_to(".")),
        "a link to a file elsewhere": lambda folder: outside(folder / name),
        "a folder": instead(Path.mkdir),
        "a folder with a file": instead(lambda path: (path.mkdir(), (path / name).touch())),
        "a file of a GiB": lambda folder: too_large(folder / name) if (folder / name).is_file() else None,
        "a file that may not be read": lambda folder: (folder / name).chmod(0) if (folder / name).is_file() else None,
        "the folder may not be listed": lambda folder: folder.chmod(0o100),
    }
    way = draw.choice(sorted(ways))
    text = way if way.startswith("the folder") else f"{name}: {way}"
    names = ("src",) if way.startswith("the folder") else (name,)
    return Edit(text, ways[way], names, unprivileged="may not" in way)


def harmless(folder: Path, draw: Random) -> Edit:
    """Break nothing: other files beside it, other whitespace and orders, unused fields, links within the folder."""
    weights = draw.choice(files(folder))

    def linked(folder: Path) -> None:
        path = folder / files(folder)[0]
        (folder / ".kept").mkdir()
        path.rename(folder / ".kept" / path.name)
        path.symlink_to(Path(".kept") / path.name)

    def header(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            path = folder / (weights if (folder / weights).is_file() else files(folder)[0])
            content, data = read(path)
            write(path, change(content), data)

        return apply

    def padded(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        return (size + 64).to_bytes(8, "little") + data[8 : 8 + size] + b" " * 64 + data[8 + size :]

    def index(folder: Path) -> None:
        rewriting(INDEX, lambda b: json.dumps({**json.loads(b), "metadata": {"total_size": 0, "a": "b"}}).encode())(
            folder
        )

    ways: dict[str, Callable[[Path], Any]] = {
        "other files beside it": lambda folder: [(folder / name).write_text("{}") for name in ("notes.txt", "a.json")],
        "a folder beside it": lambda folder: shutil.copytree(folder, folder / "checkpoint-1"),
        "a pipe beside it": lambda folder: os.mkfifo(folder / "pipe"),
        "a folder of TensorBoard": lambda folder: ((folder / "runs").mkdir(), (folder / "runs" / "events").touch()),
        "training_args.bin": lambda folder: (folder / "training_args.bin").write_bytes(b"\x80\x04"),
        "config.json in another order": on_config(lambda c: c.update([(k, c.pop(k)) for k in sorted(c)[::-1]])),
        "config.json without spaces": rewriting(CONFIG, lambda b: json.dumps(json.loads(b)).encode()),
        "a field that nobody reads": on_config(lambda c: c.update(nobody_reads_this=[1, {"a": None}])),
        "a license with a BOM": lambda folder: (folder / "LICENSE").write_bytes(b"\xef\xbb\xbfApache-2.0"),
        "weights through a link within": linked,
        "a header with spaces": lambda folder: rewriting(files(folder)[0], padded)(folder),
        "more metadata": header(lambda h: {**h, "__metadata__": {"format": "pt", "made by": "é"}}),
        "a header in another order": header(lambda h: dict(sorted(h.items(), reverse=True))),
        "another total_size": index,
    }
    way = draw.choice(sorted(ways))
    return Edit(way, ways[way], harmless=True)
