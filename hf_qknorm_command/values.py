"""The values of command-line arguments. Each parser takes text and raises ArgumentTypeError for wrong text."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

MOST = 10**12  # tokens or steps


def _number(expected: str, holds: Callable[[float], bool], kind: type[float] = float) -> Callable[[str], float]:
    """A parser of numbers for which `holds`; it raises ArgumentTypeError for other text."""

    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not holds(number):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {_short(text)}")
        return number

    return parse


COUNT = _number(f"a whole number from 1 to {MOST}", lambda number: 1 <= number <= MOST, int)
SEED = _number(f"a whole number from 0 to {2**32 - 1}", lambda number: 0 <= number < 2**32, int)
FINITE = _number("a finite number", math.isfinite)
POSITIVE = _number("a finite number > 0", lambda number: 0 < number < math.inf)
CAP = _number("a number from 1e-6 to 1e6", lambda number: 1e-6 <= number <= 1e6)  # sizes that a plot can show
KNEE = _number('a number ≥ 0, or "auto"', lambda number: 0 <= number < math.inf)


def parse_knee(text: str) -> float | str:
    return text if text == "auto" else KNEE(text)


def parse_preset(text: str) -> str:
    from hf_qknorm.scheme import SCHEMES

    names = [name for name in SCHEMES if name != "none"]
    if text not in names:
        raise argparse.ArgumentTypeError(f"invalid choice: {_short(text)} (choose from {', '.join(names)})")
    return text


def parse_method(text: str) -> str:
    from hf_qknorm.calibration.options import check_method

    try:
        check_method(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_scheme(text: str) -> Any:
    """A `Scheme` from a preset's name, or from JSON."""
    from hf_qknorm.scheme import Scheme

    try:
        return Scheme.of(json.loads(text) if text.lstrip().startswith("{") else text)
    except json.JSONDecodeError as error:
        rest = _short(text[error.pos :]) if error.pos < len(text) else "its end"
        raise argparse.ArgumentTypeError(
            f'expected a preset\'s name, or JSON as {{"q": "rms", "k": "rms"}}; this JSON breaks at character '
            f"{error.pos + 1}, {rest}: {error.msg}"
        ) from None
    except RecursionError:
        raise argparse.ArgumentTypeError("expected JSON of one level, this is nested too deeply") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _short(text: str) -> str:
    """The text as in Python, limited in length. The package's own `shorten` takes seconds to import."""
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}…"
