"""The findings of `hf-qknorm doctor`, and the comparison of versions. It imports nothing of the package, nor torch."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final, Literal

from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = "hf-qknorm"
# The oldest and the newest version that the tests have run with.
TESTED: Final[dict[str, tuple[str, str]]] = {
    "python": ("3.11", "3.13"),
    "torch": ("2.11", "2.15"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.15", "1.15"),
    "peft": ("0.21", "0.21"),
    "safetensors": ("0.8", "0.8"),
    "triton": ("3.6", "3.9"),
}
INTEGRATIONS: Final = (
    "trl", "liger-kernel", "axolotl", "ms-swift", "lm-eval", "bitsandbytes", "optimum-quanto", "deepspeed",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A line of the doctor's report. A note is worth reading; after a problem the command's exit status is 1."""

    topic: str
    text: str
    level: Literal["ok", "note", "problem"] = "ok"

    def __str__(self) -> str:
        return f"{self.topic:17}{'' if self.level == 'ok' else f'{self.level.upper()}: '}{self.text}"


def find_versions(code: str) -> Iterator[Finding]:
    """Yield the findings about installed versions. `code` is the version of the package's code."""
    stale = _stale(code)
    yield Finding(PROJECT, f"{code}, in {Path(__file__).parents[1] / 'hf_qknorm'}{stale}", "note" if stale else "ok")
    yield check_version("python", platform.python_version(), ">=3.11")
    needed = _requirements()
    for name in (*TESTED, *(name for name in needed if name not in TESTED)):
        if name != "python" and (name in needed or _installed(name)):
            yield check_version(name, _installed(name), needed.get(name, ""))
    found = [f"{name} {number}" for name in INTEGRATIONS if (number := _installed(name))]
    yield Finding("integrations", ", ".join(found) or "none is installed")


def check_version(name: str, number: str | None, needed: str) -> Finding:
    """Compare a package's version, None if it is not installed, with the needed and the tested versions.

    Every release of a tested minor version counts as tested.

    >>> check_version("transformers", "5.9.0", ">=5.17,<6").level
    'problem'
    >>> str(check_version("transformers", "5.99.0", ">=5.17,<6"))
    'transformers     NOTE: 5.99.0, which is untested: the tests have run with 5.17 to 5.24'
    """
    wanted = Requirement(f"{name}{needed}").specifier
    if number is None:
        return Finding(name, f'not installed: pip install "{name}{needed}"', "problem")
    if not wanted.contains(number, prereleases=True):
        return Finding(name, f'{number}, but {needed} is needed: pip install "{name}{needed}"', "problem")
    oldest, newest = TESTED.get(name, (number, number))
    if _minor(oldest) <= _minor(number) <= _minor(newest):
        return Finding(name, number)
    tested = oldest if newest == oldest else f"{oldest} to {newest}"
    return Finding(name, f"{number}, which is untested: the tests have run with {tested}", "note")


def _minor(number: str) -> tuple[int, ...]:
    return Version(number).release[:2]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _stale(code: str) -> str:
    """The end of a line on the package if its installed metadata, which lists the requirements, is absent or old."""
    installed = _installed(PROJECT)
    if installed is None:
        return ", which is not installed: its requirements are not checked"
    return "" if installed == code else f", installed as {installed}: install it again, to bring its requirements along"


def _requirements() -> dict[str, str]:
    """The versions that the package needs, by name, without the extras."""
    found = [Requirement(line) for line in (requires(PROJECT) or [])] if _installed(PROJECT) else []
    return {r.name: str(r.specifier) for r in found if r.marker is None or r.marker.evaluate({"extra": ""})}
