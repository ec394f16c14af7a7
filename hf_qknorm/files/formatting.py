"""Values as short text, for messages and reports."""

from __future__ import annotations

import reprlib


def shorten(value: object) -> str:
    """Return `repr(value)`, limited in length and depth."""
    short = reprlib.Repr()
    short.maxlevel, short.maxlist, short.maxdict, short.maxtuple = 3, 8, 12, 8
    short.maxlong, short.maxstring, short.maxother = 40, 120, 120
    return short.repr(value)


def format_fixed(value: float, digits: int = 3) -> str:
    """Format a number with `digits` decimals; from 1e6 on with `digits` significant digits, as in 1e+300."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 or value != value else f"{value:.{digits}g}"


def format_bytes(size: int) -> str:
    """Format a number of bytes in MB or GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
