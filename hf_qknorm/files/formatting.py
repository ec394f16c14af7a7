"""Values as short text, for messages and reports."""

from __future__ import annotations

import reprlib

MOST = 1_000  # characters of a value in a message


def shorten(value: object) -> str:
    """Return `repr(value)`, limited in length and depth. Messages show values that users or files supply by it."""
    short = reprlib.Repr()
    short.maxlevel, short.maxlist, short.maxdict, short.maxtuple = 3, 8, 12, 8
    short.maxlong, short.maxstring, short.maxother = 40, 120, 120
    try:
        text = short.repr(value)
    except ValueError:  # Python prints no number of more than 4300 digits
        text = f"a value of type {type(value).__name__} with a number of thousands of digits"
    return text if len(text) <= MOST else f"{text[:MOST]}…"


def format_fixed(value: float, digits: int = 3) -> str:
    """Format a number with `digits` decimals; from 1e6 on with `digits` significant digits, as in 1e+300."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 or value != value else f"{value:.{digits}g}"
