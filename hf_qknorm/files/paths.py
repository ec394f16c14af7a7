"""Paths and Hub names that users give, and the guard of destinations: checked before any work starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from tqdm import tqdm

from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.names import CONFIG, other_files

LONGEST: Final = 4096  # characters of a path


def user_path(name: str | os.PathLike[str], argument: str) -> Path:
    """Return the path of a user's argument, with `~` and `..` resolved. Raises ValueError for an empty one."""
    text = os.fspath(name) if isinstance(name, os.PathLike) else name
    if text == "":
        raise ValueError(f"{argument} is empty, which would mean the working directory: give a folder or a file")
    if not isinstance(text, str) or "\0" in text or len(text) > LONGEST:
        raise ValueError(f"{argument} is {shorten(text)}: expected the path of a folder or a file")
    path = Path(os.path.expanduser(text))
    return Path(os.path.realpath(path)) if ".." in path.parts else path


def is_repo_id(value: Any) -> bool:
    """Return whether `value` is a valid name of a repository."""
    try:
        validate_repo_id(value)
        return value is not None
    except HFValidationError:
        return False


def check_repo_id(value: Any, where: str) -> str:
    """Return `value` if it is a valid name of a repository. Raises ValueError, naming `where`, otherwise."""
    if not is_repo_id(value):
        raise ValueError(f"{where} is {shorten(value)}, expected a name on the Hub, as OWNER/NAME")
    return str(value)


def hub_name(name: str) -> str | None:
    """Return the name if it can only be one on the Hub; None if it is, or may be, a local path."""
    return name if is_repo_id(name) and not os.path.lexists(name) else None


def check_writable(*paths: Path) -> None:
    """Raise OSError, naming the path, unless a file can be written at each of these paths; missing parents are fine."""
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder, and a file is to be written there: move it away")
        place = next(place for place in path.absolute().parents if os.path.lexists(place))
        if not place.is_dir():
            raise NotADirectoryError(f"{place} is a file: give a folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(f"{place} may not be written to: give another folder")


def check_space(path: Path, size: int) -> None:
    """Raise OSError unless the disk of `path`, which may not exist yet, has `size` bytes free."""
    place = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if (free := shutil.disk_usage(place).free) < size:
        needed, left = (tqdm.format_sizeof(each, "B") for each in (size, free))
        raise OSError(f"{path} needs {needed}, and {place} has {left}: nothing was written")


def check_folder(path: Path, *, overwrite: bool, sources: Iterable[Any] = ()) -> None:
    """Raise OSError unless a command may create its output folder at `path`, or replace the checkpoint there.

    The folder may not be, or hold, the working directory or one of the command's inputs, `sources`. Sources that are no
    local paths (Hub names, texts in memory, None) are ignored. With `overwrite`, a folder is replaced if it holds a
    checkpoint and nothing else.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise FileExistsError(f"{path} is a file or a link: give the name of a new folder")
    check_writable(path / CONFIG)
    if not path.is_dir():
        return
    kept = [("is the working directory, or holds it", Path.cwd())]
    for source in sources:
        place = Path(os.path.expanduser(source)) if isinstance(source, str | os.PathLike) else None
        kept += [(f"is the source, or contains it ({place})", place)] if place and os.path.exists(place) else []
    for problem, place in kept:
        if Path(os.path.realpath(place)).is_relative_to(os.path.realpath(path)):
            raise FileExistsError(f"{path} {problem}: give another destination")
    if os.path.ismount(path):
        raise FileExistsError(f"{path} is a mount point, which can't be replaced: give the name of a folder in it")
    if not any(path.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{path} is not empty: give another destination, or overwrite=True (--overwrite)")
    if not (path / CONFIG).is_file():
        raise FileExistsError(f"{path} holds no {CONFIG}, so it may not be overwritten: move it away")
    if found := other_files(path):
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise FileExistsError(
            f"{path} contains other files, which overwriting would delete: {', '.join(found[:3])}{more}. Move them "
            "away, or give another destination"
        )
