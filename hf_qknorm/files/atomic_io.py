"""Writing that is whole or not at all: files and folders are made beside their place, then renamed into it.

What is not whole yet lies in a staging folder, `.NAME.RANDOM.hf_qknorm`, with a lock that its process holds. A killed
process leaves that folder. The next one that writes NAME knows it by its name, contents and free lock, and removes it.
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
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from hf_qknorm.files.untrusted import repo_id

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux' renameat2
_SUFFIX = ".hf_qknorm"  # of a staging folder
_STAGING = re.compile(r"\.(?P<name>.+)\.[a-z0-9_]{8}" + re.escape(_SUFFIX), re.DOTALL)
_LOCK, _NEW, _OLD = "lock", "new", "old"  # all that a staging folder may hold


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


def user_path(name: str | os.PathLike[str], what: str) -> Path:
    """The path that a user gave as the argument `what`, with `~` expanded. Raises ValueError for an empty one.

    `..` is resolved as the system does it, behind links: `link/../out` lies beside the folder that `link` points to.
    """
    if not os.fspath(name):
        raise ValueError(f"{what} is empty, which would mean the working directory: give the name of a folder or file")
    path = Path(os.path.expanduser(name))
    if path.parts[:1] and path.parts[0].startswith("~"):
        raise ValueError(
            f"{what} is {os.fspath(name)!r}, and there is no such user: write ./{path} for that name itself"
        )
    if ".." not in path.parts:
        return path
    return Path(os.path.realpath(path)) if path.name == ".." else Path(os.path.realpath(path.parent), path.name)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside `path`, then rename it: a killed run leaves the old file or the new one."""
    with _staging(path) as staging:
        write(staging.new)
        _sync(staging.new)
        staging.new.replace(path)


def replace_text(path: Path, text: str) -> None:
    """`replace_file` with text in UTF-8."""
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def check_writable(*paths: Path) -> None:
    """Raise OSError, naming the place and touching nothing, unless a file can be put at each of these paths.

    Folders that are not there yet may be made on the way.
    """
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder, and a file is to be written there: move it away")
        check_parent(path)


def check_parent(path: Path) -> None:
    """Raise OSError, naming the place and touching nothing, unless something new can be put at `path`."""
    folder = path.absolute().parent
    place = next(place for place in (folder, *folder.parents) if _is_there(place))
    if not place.is_dir():
        raise NotADirectoryError(f"{place} is a file: give a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"{place} may not be written to: give another folder")


def _is_there(path: Path) -> bool:
    """Whether there is anything at a path. Raises OSError for one that can't be, such as a name that is too long."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def new_folder(path: Path, check: Callable[[], object]) -> Iterator[Path]:
    """Yield an empty folder beside `path`; what is in it when the block ends well becomes `path`, at once.

    `check` raises unless `path` may be written or replaced: it is called before the block, and again before the rename,
    for what has come there meanwhile. Everything is on the disk before the rename. An exception removes the folder and
    leaves `path` as it was; a killed process leaves `path` as it was and a staging folder, which the next run removes.

    Raises FileExistsError if another process is writing the same folder.
    """
    check()
    path = Path(os.path.realpath(path.parent), path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _staging(path) as staging:
        if staging.others:
            raise FileExistsError(
                f"{path}: another process is writing there (in {staging.others[0]}). Wait for it, or stop it"
            )
        check()
        staging.new.mkdir()
        yield staging.new
        for item in [*staging.new.rglob("*"), staging.new]:
            _sync(item)
        check()
        _put(staging, path)
        _sync(path.parent)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`, for files that are of no use once the block ends, however it ends.

    A killed process leaves it, and the next one that writes `path` removes it. Where the folder of `path` is not there
    yet, it lies in the nearest one above that is.
    """
    place = next(place for place in path.absolute().parents if place.is_dir())
    with _staging(place / path.name) as staging:
        staging.new.mkdir()
        yield staging.new


def check_space(path: Path, size: int, what: str) -> None:
    """Raise OSError unless the disk of `path`, which need not be there yet, has `size` bytes free for `what`."""
    place = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(place).free
    if free < size:
        raise OSError(f"{what} needs {readable(size)}, and {place} has {readable(free)} free: nothing was written")


def readable(size: int) -> str:
    """A number of bytes, for people."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def is_leftover(folder: Path) -> bool:
    """Whether a folder is what a killed writer left: a staging folder, and nothing in it but what is put there."""
    if folder.is_symlink() or not folder.is_dir() or not _STAGING.fullmatch(folder.name):
        return False
    return all(item.name in (_LOCK, _NEW, _OLD) and not item.is_symlink() for item in folder.iterdir())


@dataclass(frozen=True)
class _Staging:
    """A folder for what is not whole yet, and the staging folders of other, living processes that write the same."""

    folder: Path
    others: list[Path]

    @property
    def new(self) -> Path:
        return self.folder / _NEW

    @property
    def old(self) -> Path:
        return self.folder / _OLD


@contextmanager
def _staging(path: Path) -> Iterator[_Staging]:
    """A locked staging folder beside `path`, once those of killed processes are removed; it goes when the block ends.

    Its name can't be foreseen, so no file or link of others is in its place. The lock is taken before others' are
    looked at: of two processes that start together, one at least sees the other.
    """
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=_SUFFIX, dir=path.parent))
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        try:
            lock.acquire()
        except (FileNotFoundError, Timeout):  # another took it for a leftover, between the last two lines
            raise FileExistsError(f"{path}: another process is writing there. Wait for it, or stop it") from None
        yield _Staging(folder, _clean(path, folder))
    finally:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def _clean(path: Path, own: Path) -> list[Path]:
    """Remove the staging folders for `path` that killed processes left; returns those of living ones."""
    living = []
    for folder in sorted(path.parent.iterdir()):
        found = _STAGING.fullmatch(folder.name)
        if folder == own or not found or found["name"] != path.name or not is_leftover(folder):
            continue
        lock = FileLock(folder / _LOCK, timeout=0)
        try:
            if (folder / _LOCK).exists():
                lock.acquire()
            if (folder / _OLD).exists():
                _restore(folder, path)
        except FileNotFoundError:  # its process ended well, just now
            continue
        except Timeout:
            living.append(folder)
            continue
        finally:
            lock.release()
        shutil.rmtree(folder, ignore_errors=True)
    return living


def _restore(folder: Path, path: Path) -> None:
    """Put back the old folder of a process that was killed between the two renames of `_put`."""
    if not os.path.lexists(path):
        (folder / _OLD).rename(path)
    elif (folder / _NEW).exists():  # then the second rename never was, and this is something else
        raise FileExistsError(f"{folder / _OLD} is {path} as it was before a run that was killed: move it away")


def _put(staging: _Staging, path: Path) -> None:
    """Rename; a folder that is there already is exchanged with the new one in one step, where the system can."""
    if not path.exists() or not any(path.iterdir()):
        staging.new.replace(path)
    elif not _exchange(staging.new, path):
        path.rename(staging.old)
        staging.new.rename(path)


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
