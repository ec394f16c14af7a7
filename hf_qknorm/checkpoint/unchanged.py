"""Whether the files of a folder are still those that were read: another process may write there meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

Stamp = tuple[int, int, int, int] | None  # device, inode, size, time of the last change in ns; None: no such file


def stamps(folder: Path, names: Iterable[str]) -> dict[str, Stamp]:
    """What tells whether each file is still the same, by its name in the folder."""
    return {name: _stamp(folder / name) for name in names}


def check_unchanged(folder: Path, before: Mapping[str, Stamp]) -> None:
    """Raise ValueError, naming the file, unless all are as they were when `before` was taken."""
    for name, stamp in before.items():
        if _stamp(folder / name) != stamp:
            raise ValueError(
                f"{folder / name} changed while it was read, so that what was read may be of two checkpoints: nothing "
                "was written. Try again when nothing else writes there"
            )


def _stamp(path: Path) -> Stamp:
    try:
        found = os.stat(path)  # of a link: what it points to
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
