"""The guard against overwriting: a command never replaces its source, and of folders only a checkpoint's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hf_qknorm.files.names import CONFIG, other_files
from hf_qknorm.files.paths import check_parent

SHOWN = 3  # names in an error


def check_folder(
    path: Path,
    *,
    overwrite: bool,
    sources: Iterable[Any] = (),
    marker: str = CONFIG,
    others: Callable[[Path], list[str]] = other_files,
) -> None:
    """Raise OSError unless a command may create its output folder at `path`, or replace the folder there.

    The folder may not be, or hold, the working directory or one of the command's inputs, `sources`. Sources that are no
    local paths (Hub names, texts in memory, None) are ignored. With `overwrite`, a folder is replaced if it has the
    file `marker`, and no `others` than the command's own.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise FileExistsError(f"{path} is a file or a link: give the name of a new folder")
    check_parent(path)
    if not path.is_dir():
        return
    kept = [("is the working directory, or holds it", Path.cwd())]
    kept += [(f"is the source, or contains it ({source})", source) for source in map(_local, sources) if source]
    for problem, place in kept:
        if Path(os.path.realpath(place)).is_relative_to(os.path.realpath(path)):
            raise FileExistsError(f"{path} {problem}: give another destination")
    if os.path.ismount(path):
        raise FileExistsError(f"{path} is a mount point, which can't be replaced: give the name of a folder in it")
    if not any(path.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(
            f"{path} exists and is not empty: give another destination, or overwrite=True (--overwrite)"
        )
    if not (path / marker).is_file():
        raise FileExistsError(f"{path} holds no {marker}, so it may not be overwritten: move it away")
    if found := others(path):
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise FileExistsError(
            f"{path} contains other files, which overwriting would delete: {', '.join(found[:SHOWN])}{more}. Move them "
            "away, or give another destination"
        )


def _local(source: Any) -> Path | None:
    """Return the path of a source that exists on this machine."""
    path = Path(os.path.expanduser(source)) if isinstance(source, str | os.PathLike) else None
    return path if path is not None and os.path.exists(path) else None
