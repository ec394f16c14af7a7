"""Writing that is whole or not at all: files and folders are made beside their place, then renamed into it."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_qknorm.strangers import repo_id

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux' renameat2


def is_path(name: str) -> bool:
    """Whether a name can only be a path: on the Hub there is OWNER/NAME at most."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def hub_name(name: str) -> str | None:
    """The name, if it can only be one on the Hub; None for what is, or may be, a path of this machine."""
    if is_path(name) or os.path.lexists(name):
        return None
    try:
        return repo_id(name, "name")
    except ValueError:
        return None


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside `path`, then rename it: a killed run leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.unlink(missing_ok=True)  # a folder from elsewhere may hold a link of this name, to be written through
    try:
        write(temporary)
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_new_folder(path: Path, *, overwrite: bool) -> None:
    """Raise FileExistsError, touching nothing, unless `new_folder(path)` may put a checkpoint there.

    What may be replaced, and with `overwrite` alone, is another checkpoint: a folder that holds a config.json.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise FileExistsError(f"{path} is a file or a link: give the name of a new folder")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(
            f"{path} exists and is not empty: give another destination, or overwrite=True (--overwrite)"
        )
    if not (path / "config.json").is_file():
        raise FileExistsError(f"{path} holds no config.json, so it is no checkpoint and not overwritten: move it away")


@contextmanager
def new_folder(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `path`; what is in it when the block ends well becomes `path`, at once.

    Everything is on the disk before the rename. An exception removes the folder and leaves `path` as it was; a killed
    process leaves `path` as it was and the folder `.NAME.partial`, which the next run removes.

    Raises FileExistsError as `check_new_folder` does, and if another process is writing the same folder.
    """
    path = Path(os.path.abspath(path))
    check_new_folder(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with _locked(path.with_name(f".{path.name}.lock"), path):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            for item in [*partial.rglob("*"), partial]:
                _sync(item)
            _put(partial, path)
            _sync(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(lock: Path, path: Path) -> Iterator[None]:
    """Hold a lock file, which the system lets go when the process ends, however it ends."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = lock.exists() and os.path.samestat(lock.stat(), os.fstat(handle.fileno()))
        except BlockingIOError:
            held = False
        if not held:  # or its holder removed the file just now
            raise FileExistsError(f"{path}: another process is writing there. Wait for it, or stop it")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _put(partial: Path, path: Path) -> None:
    """Rename; a folder that is there already is exchanged with the new one in one step, where the system can."""
    if not path.exists() or not any(path.iterdir()):
        partial.replace(path)
        return
    if not _exchange(partial, path):
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        partial.rename(path)
        shutil.rmtree(old)


def _exchange(a: Path, b: Path) -> bool:
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0)


def _sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    if path.is_dir() and sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
