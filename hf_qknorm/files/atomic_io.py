"""Atomic writes: a file or folder is made in a hidden folder beside its place, then renamed.

A killed process leaves that hidden folder, `.NAME.RANDOM`, which may be removed. If it was replacing a folder, and was
killed between the two renames, the hidden folder has the replaced one as `old`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hf_qknorm.files.paths import check_writable


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path, then rename that file to `path`; a killed process leaves the old file.

    Missing parents are made. Raises OSError, before `write` is called, for a path that can't be written to.
    """
    check_writable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _hidden_folder(path) as hidden:
        write(hidden / path.name)
        _sync(hidden / path.name)
        (hidden / path.name).replace(path)


def replace_text(path: Path, text: str) -> None:
    """Write text in UTF-8 with `replace_file`."""
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextmanager
def new_folder(path: Path, check: Callable[[], object]) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `path` once the block ends without an exception and it is on the disk.

    `check` raises unless `path` may be created or replaced. It runs before the block and again before the rename. The
    folder's parent is a hidden folder for temporary files. An exception removes it, and leaves `path` unchanged.
    """
    check()
    path = Path(os.path.realpath(path))  # no link: `check` refuses those
    path.parent.mkdir(parents=True, exist_ok=True)
    with _hidden_folder(path) as hidden:
        new, old = hidden / "new", hidden / "old"
        new.mkdir()
        yield new
        for item in [*new.rglob("*"), new]:
            _sync(item)
        check()
        try:
            if path.exists():
                path.rename(old)
            new.rename(path)
        except BaseException:  # Ctrl-C too
            if old.exists() and not path.exists():
                old.rename(path)
            raise
        _sync(path.parent)


@contextmanager
def _hidden_folder(path: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `path`, on its disk; its random name keeps others from placing files there."""
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    if path.is_dir() and sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
