"""Detection of files that another process changes while they are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

Fingerprint = tuple[int, int, int, int] | None  # device, inode, size, time of the last change in ns; None: no such file


def fingerprints(folder: Path, names: Iterable[str]) -> dict[str, Fingerprint]:
    """Return the fingerprint of each file of `folder`, by name."""
    return {name: _fingerprint(folder / name) for name in names}


def check_unchanged(folder: Path, before: Mapping[str, Fingerprint]) -> None:
    """Raise ValueError, naming the file, unless all files have the fingerprints `before`."""
    for name, fingerprint in before.items():
        if _fingerprint(folder / name) != fingerprint:
            raise ValueError(
                f"{folder / name} changed while it was read, so that the data may be of two checkpoints: nothing was "
                "written. Try again when nothing else writes there"
            )


def _fingerprint(path: Path) -> Fingerprint:
    try:
        found = os.stat(path)  # of a link: of its target
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
