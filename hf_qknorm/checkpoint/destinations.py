"""Checks of a destination: a command never overwrites its source, and replaces only what a command like it wrote."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from hf_qknorm.files.names import CONFIG, FOLDERS, unknown_files
from hf_qknorm.files.paths import check_parent
from hf_qknorm.files.untrusted import read_json

SHOWN = 3  # names in an error
CHECKPOINT = (CONFIG, "model_type")  # the file that marks a folder as a checkpoint, and a key in it


def check_new(path: Path, *, overwrite: bool) -> None:
    """Raise OSError unless a new folder can be put at `path`; FileExistsError if a folder there may not be replaced.

    The working directory and its parents are never replaced: shells would stay in a folder that is gone.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise FileExistsError(f"{path} is a file or a link: give the name of a new folder")
    check_parent(path)
    if not path.is_dir():
        return
    if _holds(path, Path.cwd()):
        raise FileExistsError(f"{path} is the working directory, or holds it: give the name of a new folder")
    if os.path.ismount(path):
        raise FileExistsError(f"{path} is a mount point, which can't be replaced: give the name of a folder in it")
    if any(path.iterdir()) and not overwrite:
        raise FileExistsError(
            f"{path} exists and is not empty: give another destination, or overwrite=True (--overwrite)"
        )


def check_folder(
    path: Path,
    *,
    overwrite: bool,
    sources: Iterable[Any] = (),
    marker: tuple[str, str] = CHECKPOINT,
    unknown: Callable[[Path], list[str]] = unknown_files,
) -> None:
    """Raise FileExistsError unless a command may create its output folder at `path`, or replace the folder there.

    `sources` are the command's inputs: none may be the replaced folder, lie in it, or have links into it. Sources that
    are no local paths (Hub names, texts in memory, None) are ignored. With `overwrite`, a folder is replaced if it has
    the file and key of `marker`, and no `unknown` files other than copies of a source's own files.
    """
    here = _on_this_machine(sources)
    for source in here:
        check_apart(path, source)
        if path.name in FOLDERS and path.parent.exists() and os.path.samefile(path.parent, source):
            raise FileExistsError(f"{path} would become a part of {source}: give another destination")
    check_new(path, overwrite=overwrite)
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not _has_key(path, *marker):
        raise FileExistsError(
            f"{path} holds no {marker[0]} with {marker[1]!r}, so it may not be overwritten: move it away"
        )
    if others := [name for name in unknown(path) if not any(_is_copy(path / name, source / name) for source in here)]:
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        raise FileExistsError(
            f"{path} contains other files, which overwriting would delete: {', '.join(others[:SHOWN])}"
            f"{more}. Move them away, or give another destination"
        )


def check_files(folder: Path, names: Iterable[str], *, sources: Iterable[Any], marker: tuple[str, str]) -> None:
    """Raise FileExistsError unless a command may write the files `names` into `folder`.

    They may not be among its `sources`, nor lie in the folder of one. Existing files are replaced only if the folder
    has the file and key of `marker`, which the same command wrote.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: give a folder")
    there = [folder / name for name in names if os.path.lexists(folder / name)]
    for source in _on_this_machine(sources):
        if folder.exists() and os.path.samefile(folder, source):
            raise FileExistsError(f"{folder} is the source: give another folder, as nothing is added to a source")
        for path in there:
            check_apart(path, source)
    if there and not _has_key(folder, *marker):
        raise FileExistsError(f"{there[0]} exists, and is not from this command: move it away, or give another folder")


def check_apart(path: Path, source: Path) -> None:
    """Raise FileExistsError if an existing source, or the target of a link in it, is `path` or lies in it."""
    places = ("*", *(f"{name}/*" for name in FOLDERS))
    for item in (source, *chain.from_iterable(map(source.glob, places))):  # of a file, no more than the file
        if (item is source or item.is_symlink()) and _holds(path, item):
            problem = "is the source, or contains it" if item is source else f"contains the target of the link {item}"
            raise FileExistsError(f"{path} {problem} ({source}): give another destination")


def _on_this_machine(sources: Iterable[Any]) -> list[Path]:
    paths = [Path(os.path.expanduser(source)) for source in sources if isinstance(source, str | os.PathLike)]
    return [path for path in paths if os.path.exists(path)]


def _holds(path: Path, item: Path) -> bool:
    """Return whether `path` is `item` or one of its parents, with all links resolved."""
    real = Path(os.path.realpath(item))
    return path.exists() and any(p.exists() and os.path.samefile(path, p) for p in (real, *real.parents))


def _has_key(folder: Path, name: str, key: str) -> bool:
    """Return whether the JSON file `name` of a folder is a mapping with a key."""
    try:
        data = read_json(folder / name)
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and key in data


def _is_copy(path: Path, original: Path) -> bool:
    return path.is_file() and original.is_file() and filecmp.cmp(path, original, shallow=False)
