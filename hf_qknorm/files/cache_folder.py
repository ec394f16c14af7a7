"""The folder of files that this machine can make again: compiled kernels, and verdicts on kernels.

Code is loaded from it, so that no user but its own, and root, may write to it, to its files, or to its parents.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache, partial
from io import BufferedReader
from pathlib import Path
from typing import Final

from hf_qknorm.files.atomic_io import replace_file

if sys.platform != "win32":
    import grp
    import pwd

DAY: Final = 24 * 3600
KEPT: Final = 90 * DAY  # after a file's last use
_ROOT: Final = 0
_UID_MAP, _OVERFLOW_UID = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")  # on Linux


class UntrustedError(PermissionError):
    """Another user may have written a file, or may replace a folder."""


def folder() -> Path:
    """`$XDG_CACHE_HOME/hf_qknorm`, by default `~/.cache/hf_qknorm`, with links resolved; it need not exist.

    Raises UntrustedError if another user may write to it or replace it, and RuntimeError for a user without a home.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hf_qknorm")
    if not named.is_absolute():
        raise UntrustedError(
            f"the cache folder {named} depends on the working directory: set XDG_CACHE_HOME to an absolute path"
        )
    path = Path(os.path.realpath(named))
    for place in (path, *path.parents):
        with suppress(FileNotFoundError):
            _check(place, place.lstat(), is_parent=place != path)
    return path


def make_folder() -> Path:
    """Return `folder()`, created with its parents, with mode 0700. Raises OSError if it can not be written to."""
    path = folder()
    try:
        for place in reversed((path, *path.parents)):
            place.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise PermissionError(
            f"{path} can't be made ({error.strerror}): set XDG_CACHE_HOME to a folder of your own"
        ) from error
    made = folder()  # another user may have been first
    if not os.access(made, os.W_OK | os.X_OK):
        raise PermissionError(f"{made} may not be written to: set XDG_CACHE_HOME to a folder of your own")
    return made


def open_file(path: Path) -> BufferedReader:
    """Open a file of the folder to read it. Raises UntrustedError if another user may write to it."""
    no_link = getattr(os, "O_NOFOLLOW", 0)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | no_link))  # noqa: SIM115
    try:
        _check(path, os.fstat(file.fileno()))
    except UntrustedError:
        file.close()
        raise
    return file


def store(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file of the folder with `replace_file`, so that no other user may write to it, whatever the umask."""

    def write_alone(new: Path) -> None:
        write(new)
        new.chmod(0o644)

    replace_file(path, write_alone)


def store_text(path: Path, text: str) -> None:
    """Write text in UTF-8 with `store`."""
    store(path, partial(Path.write_text, data=text, encoding="utf-8"))


def mark_used(file: BufferedReader) -> None:
    """Set a file's time to now, at most once a day, where that is permitted: `remove_unused` goes by it."""
    with suppress(OSError):
        if time.time() - os.fstat(file.fileno()).st_mtime > DAY:
            os.utime(file.fileno())


def remove_unused(start: re.Pattern[str]) -> None:
    """Remove the folder's files whose names start so, unless one with the same start was used in the last 90 days.

    Other versions of this package, and other machines, may use the same folder.
    """
    files = defaultdict(list)
    with suppress(OSError):  # another process removes them too, or this user may not
        for file in folder().iterdir():
            if match := start.match(file.name):
                files[match[0]].append(file)
        for found in files.values():
            if time.time() - max(file.lstat().st_mtime for file in found) > KEPT:
                for file in found:
                    file.unlink()


def _check(place: Path, found: os.stat_result, *, is_parent: bool = False) -> None:
    """Raise UntrustedError if another user but root owns a file or folder, or may write to it.

    In a parent, others may not rename the folder: a sticky one, as /tmp, is fine, and so is a group of this user alone.
    """
    if sys.platform == "win32":  # which has other permissions, and keeps the default folder private
        return
    writers = stat.S_IWGRP | stat.S_IWOTH
    owners: Collection[int] = (_ROOT, os.geteuid())
    if is_parent:
        owners = (*owners, *_unmapped_owners())
        if found.st_mode & stat.S_ISVTX:
            writers = 0
        elif found.st_mode & stat.S_IWGRP and _is_alone_in(found.st_gid):
            writers = stat.S_IWOTH
    if found.st_uid not in owners:
        reason, remedy = f"belongs to the user {found.st_uid}, not to {os.geteuid()}", ""
    elif found.st_mode & writers:
        reason = f"has mode {stat.S_IMODE(found.st_mode):04o}, with which other users may write to it"
        remedy = f"run `chmod go-w {shlex.quote(str(place))}`, or "
    else:
        return
    raise UntrustedError(
        f"{place} {reason}, and nothing is loaded from there: {remedy}set XDG_CACHE_HOME to a folder of your own"
    )


@cache
def _is_alone_in(group: int) -> bool:
    """Whether this user is the only one of a group: with a umask of 002, folders are open to a group of their own."""
    try:
        members = {user.pw_name for user in pwd.getpwall() if user.pw_gid == group} | {*grp.getgrgid(group).gr_mem}
        return members == {pwd.getpwuid(os.geteuid()).pw_name}
    except KeyError:  # no such user or group
        return False


@cache
def _unmapped_owners() -> Collection[int]:
    """In a user namespace without root, as of Apptainer, the user that stands for root, and for all others."""
    with suppress(OSError, ValueError):
        if str(_ROOT) not in _UID_MAP.read_text().split()[::3]:
            return (int(_OVERFLOW_UID.read_text()),)
    return ()
