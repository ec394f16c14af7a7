"""Reading of untrusted files: limits on size and depth, checks of values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

from hf_qknorm.files.formatting import shorten

DEPTH = 100  # of nested JSON: a config has a few levels; transformers' own code recurses on them
JSON_BYTES = 64 * 2**20  # a report of 100 layers of 128 heads has 8 MB

_UNREADABLE: Final = re.compile("[\udc80-\udcff]")  # as Python escapes bytes that are not UTF-8
FEW = 3  # bytes that are not UTF-8 in a short text: a cut through a character leaves as many


def read_text(path: Path, limit: int) -> str:
    """Return the text of a file. Raises ValueError, naming it, if it exceeds `limit` bytes or is not UTF-8."""
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} is larger than {limit:,} bytes, the most that is read: check what is in it")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): download it again") from None


def read_start(path: Path, limit: int) -> str:
    """Return up to `limit` characters of a file, a few of them U+FFFD in place of bytes that are not UTF-8.

    Raises ValueError, naming the file, for null bytes, or for more than 1 % of such characters.
    """
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        text = file.read(min(limit, path.stat().st_size))  # a file has at most as many characters as bytes
    if "\0" in text:
        raise ValueError(f"{path} is no text in UTF-8: it holds null bytes")
    bad = len(_UNREADABLE.findall(text))
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if bad else text
    if bad > max(FEW, len(text) // 100):
        raise ValueError(
            f"{path} is no text in UTF-8: of its first {len(text):,} characters, {bad:,} can't be read. Convert it "
            "(iconv -f LATIN1 -t UTF-8, for example)"
        )
    return text


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """Return the data of a JSON file. Raises ValueError, naming it, if it is too large, too deep, or no JSON."""
    text = read_text(path, limit)
    try:
        data = json.loads(text)
        if not is_shallow(data):
            raise RecursionError
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: expected at most {DEPTH} levels") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): download it again") from error
    return data


def is_shallow(data: object) -> bool:
    """Return whether lists and mappings are nested at most `DEPTH` deep: a recursion over them is safe."""
    level = [data]
    for _ in range(DEPTH):
        nested = (item for item in level if isinstance(item, dict | list | tuple))
        level = [*chain.from_iterable(item.values() if isinstance(item, dict) else item for item in nested)]
    return not level


def check_keys(data: Any, names: Sequence[str], where: str, optional: Sequence[str] = ()) -> None:
    """Raise ValueError unless `data` is a mapping with the keys `names` and perhaps `optional` ones."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is {shorten(data)}, expected a mapping with {', '.join(names)}")
    if missing := [name for name in names if name not in data]:
        raise ValueError(f"{where}.{missing[0]} is missing: expected {', '.join(names)}")
    if unknown := [name for name in data if name not in names and name not in optional]:
        raise ValueError(f"{where}.{_key(unknown[0])} is unknown: expected {', '.join((*names, *optional))}")


def _key(name: object) -> str:
    return name if isinstance(name, str) and name.isidentifier() and len(name) < 80 else shorten(name)


def check_number(value: Any, where: str) -> float:
    """Return `value` as a float, which may be NaN or infinite. Raises ValueError, naming `where`, otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} is {shorten(value)}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{where} is {shorten(value)}, expected a number that a float can hold") from None


def check_positive(value: Any, where: str) -> float:
    """Return `value` as a finite float > 0. Raises ValueError, naming `where`, otherwise."""
    result = check_number(value, where)
    if not (math.isfinite(result) and result > 0):
        raise ValueError(f"{where} is {value}, expected a finite number > 0")
    return result


def check_finite(data: Any, where: str) -> None:
    """Raise ValueError, naming its place from `where` on, for a number in JSON data that is NaN or infinite."""
    if isinstance(data, float) and not math.isfinite(data):
        raise ValueError(f"{where} is {data}, expected a finite number")
    if isinstance(data, dict):
        for name, item in data.items():
            check_finite(item, f"{where}.{name}")
    elif isinstance(data, list | tuple):
        for i, item in enumerate(data):
            check_finite(item, f"{where}[{i}]")
