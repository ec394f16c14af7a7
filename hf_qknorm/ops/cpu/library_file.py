"""A compiled library on the disk: stored with its size and digest, compared with them, and loaded.

To load a damaged library can end the process: the pages that are missing from its end raise SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import CDLL
from hashlib import file_digest
from io import BufferedReader
from pathlib import Path
from typing import Final

from hf_qknorm.files.cache_folder import mark_used, open_file, store, store_text

_SHORT: Final = 1000  # bytes; a record has less than 100
# They stay open: dlopen knows a library by its name, which here is the number of an open file
_loaded: Final[list[BufferedReader]] = []


def store_library(library: Path, compile_to: Callable[[Path], object]) -> None:
    """Write a library, and its record before it: a library without one counts as damaged."""

    def compile_and_record(new: Path) -> None:
        compile_to(new)
        with new.open("rb") as file:
            store_text(_record(library), _measured(file))

    store(library, compile_and_record)


def why_unsound(library: Path) -> str | None:
    """The reason why a library can't be loaded, or None if it is as it was compiled."""
    try:
        _open_sound(library).close()
    except OSError as error:
        return str(error)
    return None


def load(library: Path) -> None:
    """Load a library. Raises OSError if it is not as it was compiled, or does not load."""
    file = _open_sound(library)
    _loaded.append(file)
    mark_used(file)
    try:
        CDLL(f"/proc/self/fd/{file.fileno()}")  # the file that was compared, whichever the path names by now
    except OSError as error:
        raise OSError(f"{library} does not load: {error}") from None


def _open_sound(library: Path) -> BufferedReader:
    file = open_file(library)
    try:
        if _read_record(library) != _measured(file):
            raise OSError(f"{library} is damaged: its size or digest differs from {_record(library)}")
    except OSError:
        file.close()
        raise
    return file


def _record(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _read_record(library: Path) -> str:
    """The stored record; empty where there is no library."""
    try:
        with open_file(_record(library)) as file:
            return file.read(_SHORT).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _measured(file: BufferedReader) -> str:
    """The size and the digest of a file's contents."""
    return f"{os.fstat(file.fileno()).st_size} {file_digest(file, 'sha256').hexdigest()}\n"
