"""Reading of untrusted files: limits on size and depth, checks of values."""

from __future__ import annotations

import math
from numbers import Integral
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from hf_qknorm.files.formatting import shorten

JSON_BYTES = 64 * 2**20  # a report of 100 layers of 128 heads has 8 MB


def read_bytes(path: Path, limit: int = JSON_BYTES) -> bytes:
    """Return the bytes of a file. Raises ValueError, naming it, for more than `limit`."""
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} is larger than {limit:,} bytes, the most that is read: check what is in it")
    return data


def read_start(path: Path, limit: int) -> str:
    """Return up to `limit` characters of a file, a few of them U+FFFD in place of bytes that are not UTF-8.

    Raises ValueError, naming the file, if more than 1 % are such characters or null bytes.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(min(limit, path.stat().st_size))  # a file has at most as many characters as bytes
    bad = text.count("\ufffd") + text.count("\0")
    if bad > max(3, len(text) // 100):  # a cut through a character leaves up to three
        raise ValueError(
            f"{path} is no text in UTF-8: of its first {len(text):,} characters, {bad:,} can't be read. Convert it "
            "(iconv -f LATIN1 -t UTF-8, for example)"
        )
    return text


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """Return the data of a JSON file. Raises ValueError, naming it, if it is too large, too deep, or no JSON."""
    data = read_bytes(path, limit)
    try:
        return from_json(data)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): download it again") from None


def check_positive(value: Any, where: str) -> float:
    """Return `value` as a finite float > 0. Raises ValueError, naming `where`, otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{where} is {shorten(value)}, expected a finite number > 0")
    return float(value)


def check_count(value: Any, where: str) -> int:
    """Return a whole number of at least 1. Raises ValueError, naming `where`, for anything else."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{where}={shorten(value)}: expected at least 1, and a whole number")
    return int(value)


def check_finite(data: Any, where: str) -> None:
    """Raise ValueError, naming its place from `where` on, for a number in JSON data that is NaN or infinite."""
    if isinstance(data, float) and not math.isfinite(data):
        raise ValueError(f"{where} is {data}, expected a finite number")
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list | tuple) else ()
    for name, item in items:
        check_finite(item, f"{where}[{name}]" if isinstance(name, int) else f"{where}.{name}")


def load_tokenizer(name: str | Path) -> Any:
    """Load the tokenizer of a folder or Hub name. Raises OSError or ValueError, naming it, if there is none."""
    from transformers import AutoTokenizer  # the command's help needs none

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of each tokenizer library, and of transformers, whose messages have paragraphs
        kind = OSError if isinstance(error, OSError) else ValueError
        problem = " ".join(str(error).split())
        raise kind(
            f"{name}: no tokenizer can be loaded: {problem}. Copy its files there, or in Python pass tokenizer="
        ) from error
