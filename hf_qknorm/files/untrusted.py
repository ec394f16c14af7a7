"""Data that others wrote, such as a checkpoint from the Hub: read within limits, and told in a few words."""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

DEPTH = 100  # of nested JSON: a config has a handful of levels; transformers' own code recurses on them
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
JSON_BYTES = 64 * 2**20  # a report of 100 layers of 128 heads has 8 MB


def brief(value: object) -> str:
    """`repr`, of bounded length and depth: for error messages."""
    short = reprlib.Repr()
    short.maxlevel, short.maxlist, short.maxdict, short.maxtuple = 3, 8, 12, 8
    short.maxlong, short.maxstring, short.maxother = 40, 120, 120
    return short.repr(value)


def fixed(value: float, digits: int = 3) -> str:
    """A number with so many decimals, or in the form 1e+300 where those would be a line of digits."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 or value != value else f"{value:.{digits}g}"


def read_text(path: Path, limit: int) -> str:
    """The text of a file. Raises ValueError, naming it, for one that is larger than `limit` bytes, or no UTF-8."""
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} is larger than {limit:,} bytes, the most that is read: what is in it?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error}): download it again") from None


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """What a JSON file holds. Raises ValueError, naming it, if it is too large, too deeply nested, or no JSON."""
    text = read_text(path, limit)
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: expected at most {DEPTH} levels") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): download it again") from error
    if not is_shallow(data):
        raise ValueError(f"{path} is nested too deeply: expected at most {DEPTH} levels")
    return data


def is_shallow(data: object) -> bool:
    """Whether lists and mappings are nested at most `DEPTH` deep, so that a recursion over them ends well."""
    level = [data]
    for _ in range(DEPTH):
        level = [
            item
            for one in level
            if isinstance(one, dict | list | tuple)
            for item in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return True
    return False


def check_keys(data: Any, names: Sequence[str], where: str, optional: Sequence[str] = ()) -> None:
    """Raise ValueError unless `data` is a mapping of these names, and perhaps the `optional` ones."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is {brief(data)}, expected a mapping with {', '.join(names)}")
    if missing := [name for name in names if name not in data]:
        raise ValueError(f"{where}.{missing[0]} is missing: expected {', '.join(names)}")
    if unknown := [name for name in data if name not in names and name not in optional]:
        raise ValueError(f"{where}.{_key(unknown[0])} is unknown: expected {', '.join((*names, *optional))}")


def _key(name: object) -> str:
    return name if isinstance(name, str) and name.isidentifier() and len(name) < 80 else brief(name)


def number(value: Any, where: str) -> float:
    """`value` as a float, which may be NaN or infinite. Raises ValueError for what is none, or fits in none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} is {brief(value)}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{where} is {brief(value)}, expected a number that a float can hold") from None


def positive(value: Any, where: str) -> float:
    """`value` as a finite float > 0. Raises ValueError for anything else."""
    result = number(value, where)
    if not (math.isfinite(result) and result > 0):
        raise ValueError(f"{where} is {value}, expected a finite number > 0")
    return result


def count(value: Any, where: str) -> int:
    """`value`, a whole number ≥ 0 of at most 63 bits. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{where} is {brief(value)}, expected a whole number ≥ 0")
    return value


def repo_id(value: Any, where: str) -> str | None:
    """`value`, a name that can be one on the Hub, or None. Raises ValueError for anything else."""
    return None if value is None else repo_name(value, where, "a name on the Hub, as OWNER/NAME, or nothing")


def repo_name(value: Any, where: str, expected: str = "a name on the Hub, as OWNER/NAME") -> str:
    """`value`, a name that can be one on the Hub. Raises ValueError for anything else."""
    try:
        if not isinstance(value, str) or len(value) > 200:
            raise HFValidationError("no name at all")
        validate_repo_id(value)
    except HFValidationError:
        raise ValueError(f"{where} is {brief(value)}, expected {expected}") from None
    return value


def hub_token(token: str | None = None) -> str | None:
    """`token`, or by default the one that this machine is logged in with, if any.

    Raises ValueError, without printing it, for one with a character that no token has.
    """
    used = token or get_token()
    strange = next((c for c in used or "" if not ("!" <= c <= "~")), None)
    if strange is not None:
        place = "token=" if token else "the one saved by `hf auth login`"
        if not token and (name := next((name for name in TOKEN_VARIABLES if os.environ.get(name)), None)):
            place = f"the environment's {name}"
        raise ValueError(
            f"the token for the Hub ({place}) holds the character U+{ord(strange):04X}, which no token has: copy it "
            "again, without what stands around it"
        )
    return used
