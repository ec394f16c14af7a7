"""Paths that users give: expanded, and checked for permission and disk space before any work starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hf_qknorm.files.formatting import format_bytes, shorten


def user_path(name: str | os.PathLike[str], argument: str) -> Path:
    """Return the path of a user's argument, with `~` expanded. Raises ValueError for an empty one.

    `..` is resolved after links, as the system does: `link/../out` is beside the folder that `link` points to.
    """
    if not os.fspath(name):
        raise ValueError(
            f"{argument} is empty, which would mean the working directory: give the name of a folder or file"
        )
    path = Path(os.path.expanduser(name))
    if path.parts[:1] and path.parts[0].startswith("~"):
        raise ValueError(
            f"{argument} is {shorten(os.fspath(name))}, and there is no such user: write ./{path} for that name itself"
        )
    if ".." not in path.parts:
        return path
    return Path(os.path.realpath(path)) if path.name == ".." else Path(os.path.realpath(path.parent), path.name)


def check_writable(*paths: Path) -> None:
    """Raise OSError, naming the path, unless a file can be written at each of these paths; missing parents are fine."""
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder, and a file is to be written there: move it away")
        check_parent(path)


def check_parent(path: Path) -> None:
    """Raise OSError, naming the folder, unless a file or folder can be created at `path`; missing parents are fine."""
    folder = path.absolute().parent
    place = next(place for place in (folder, *folder.parents) if _exists(place))
    if not place.is_dir():
        raise NotADirectoryError(f"{place} is a file: give a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"{place} may not be written to: give another folder")


def _exists(path: Path) -> bool:
    """Return whether a file, folder or link exists. Raises OSError for an impossible path, such as a too long name."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_space(path: Path, size: int, content: str) -> None:
    """Raise OSError unless the disk of `path`, which may not exist yet, has `size` bytes free for `content`."""
    place = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(place).free
    if free < size:
        raise OSError(
            f"{content} needs {format_bytes(size)}, and {place} has {format_bytes(free)} free: nothing was written"
        )
