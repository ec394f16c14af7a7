"""Atomic writes: a file or folder is made in a staging folder beside its destination, then renamed.

The staging folder of NAME is `.NAME.RANDOM.hf_qknorm`, with a file that its process keeps locked. A killed process
leaves the folder behind. The next process that writes NAME knows it by name, contents and free lock, and removes it.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux' renameat2
_SUFFIX = ".hf_qknorm"  # of a staging folder
_STAGING = re.compile(r"\.(?P<name>.+)\.[a-z0-9_]{8}" + re.escape(_SUFFIX), re.DOTALL)
_LOCK, _NEW, _OLD = "lock", "new", "old"  # the only names in a staging folder


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path, then rename that file to `path`; a killed process leaves the old file.

    An OSError of the system names `path`, if it names no file.
    """
    try:
        with _staging(path) as (folder, _):
            write(folder / _NEW)
            _sync(folder / _NEW)
            (folder / _NEW).replace(path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # as of a full disk
            error.filename = str(path)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write text in UTF-8 with `replace_file`."""
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextmanager
def new_folder(path: Path, check: Callable[[], object]) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `path` once the block ends without an exception and it is on the disk.

    `check` raises unless `path` may be created or replaced. It runs before the block and again before the rename. An
    exception leaves `path` unchanged and removes the folder; a killed process leaves `path` unchanged too.

    Raises FileExistsError if another process is writing the same folder.
    """
    check()
    path = Path(os.path.realpath(path.parent), path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _staging(path) as (folder, others):
        if others:
            raise FileExistsError(f"{path}: another process is writing there (in {others[0]}). Wait for it, or stop it")
        check()
        new = folder / _NEW
        new.mkdir()
        yield new
        for item in [*new.rglob("*"), new]:
            _sync(item)
        check()
        _move(new, path, folder / _OLD)
        _sync(path.parent)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path` for temporary files; it is removed when the block ends.

    If the parent of `path` does not exist, the folder is made in the nearest parent that does. A killed process leaves
    it behind, and the next process that writes `path` removes it.
    """
    place = next(place for place in path.absolute().parents if place.is_dir())
    with _staging(place / path.name) as (folder, _):
        (folder / _NEW).mkdir()
        yield folder / _NEW


def is_leftover(folder: Path) -> bool:
    """Return whether a folder is a staging folder, by its name, with nothing in it but a writer's own files."""
    if folder.is_symlink() or not folder.is_dir() or not _STAGING.fullmatch(folder.name):
        return False
    return all(item.name in (_LOCK, _NEW, _OLD) and not item.is_symlink() for item in folder.iterdir())


@contextmanager
def _staging(path: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yield a locked staging folder beside `path`, and the folders of other running processes that write `path`.

    The random name keeps others from placing a file or link there. The lock is taken before the search for other
    staging folders: of two processes that start together, at least one sees the other.
    """
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=_SUFFIX, dir=path.parent))
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        try:
            lock.acquire()
        except (FileNotFoundError, Timeout):  # another process took the folder for a leftover before it was locked
            raise FileExistsError(f"{path}: another process is writing there. Wait for it, or stop it") from None
        yield folder, _remove_leftovers(path, folder)
    finally:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(path: Path, own: Path) -> list[Path]:
    """Remove the staging folders for `path` of killed processes; return the running ones'.

    Other users' folders, as in /tmp, are left alone: their contents may be unreadable, or made to be put in place here.
    """
    running = []
    for folder in sorted(path.parent.iterdir()):
        found = _STAGING.fullmatch(folder.name)
        if folder == own or not found or found["name"] != path.name:
            continue
        lock = FileLock(folder / _LOCK, timeout=0)
        try:
            if folder.lstat().st_uid != own.lstat().st_uid or not is_leftover(folder):
                continue
            if (folder / _LOCK).exists():
                lock.acquire()
            if (folder / _OLD).exists():
                _restore(folder, path)
        except FileNotFoundError:  # its process has just ended
            continue
        except Timeout:
            running.append(folder)
            continue
        finally:
            lock.release()
        shutil.rmtree(folder, ignore_errors=True)
    return running


def _restore(folder: Path, path: Path) -> None:
    """Put back the old folder of a process that was killed between the two renames of `_move`."""
    if not os.path.lexists(path):
        (folder / _OLD).rename(path)
    elif (folder / _NEW).exists():  # the second rename did not happen: `path` is from another process
        raise FileExistsError(f"{folder / _OLD} is {path} as it was before a run that was killed: move it away")


def _move(new: Path, path: Path, old: Path) -> None:
    """Rename `new` to `path`. An existing folder is exchanged in one step if the system can, else moved to `old`."""
    if not path.exists() or not any(path.iterdir()):
        new.replace(path)
    elif not _exchange(new, path):
        path.rename(old)
        new.rename(path)


def _exchange(a: Path, b: Path) -> bool:
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    return bool(rename and rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0)


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    if path.is_dir() and sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
