"""Seeded cases: a sound checkpoint, and the edits that break it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from broken import edits, files, tensors
from broken.bases import BASES, LAYOUTS, Base, whole
from broken.edits import Draw, Edit
from broken.worker import NOBODY

DRAWS: dict[str, Draw] = {
    "config field": edits.field,
    "config field missing": edits.missing,
    "config field added": edits.added,
    "model_type, architectures": edits.kind,
    "config text": files.text,
    "scheme": edits.scheme,
    "header": tensors.header,
    "tensor": tensors.tensor,
    "gain": tensors.gain,
    "index, layout": files.index,
    "tokenizer": files.tokenizer,
    "place of a file": files.place,
    "harmless": files.harmless,
}
KINDS = (*DRAWS, "two of them", "untouched")
PATCHED_ONLY = ("scheme", "gain")


@dataclass(frozen=True)
class Case:
    """A checkpoint, and the edits that break it."""

    number: int
    kind: str
    base: Base
    layout: str
    edits: tuple[Edit, ...]

    @property
    def harmless(self) -> bool:
        return all(edit.harmless for edit in self.edits)

    @property
    def unprivileged(self) -> bool:
        return any(edit.unprivileged for edit in self.edits)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for edit in self.edits for name in edit.names)

    def __str__(self) -> str:
        how = "; ".join(edit.text for edit in self.edits) or "nothing"
        return f"{self.number} ({self.base.name}, {self.layout}): {how}"


def make_case(root: Path, seed: int, number: int) -> Case:
    """Return the case with this number: kinds of edits go round, the rest is drawn."""
    draw, kind = Random(f"{seed}-{number}"), KINDS[number % len(KINDS)]
    layout = draw.choice(sorted(LAYOUTS))
    kinds = {"two of them": tuple(draw.sample(sorted(DRAWS), 2)), "untouched": ()}.get(kind, (kind,))
    patched = any(kind in PATCHED_ONLY for kind in kinds)
    bases = [base for base in BASES.values() if base.scheme is not None or not patched]
    base = draw.choice(bases)
    folder = whole(root, base, layout)
    drawn: list[Edit] = []
    for one in kinds:
        edit = None
        while edit is None:
            edit = DRAWS[one](folder, draw)
        drawn.append(edit)
    return Case(number, kind, base, layout, tuple(drawn))


def break_copy(case: Case, root: Path, place: Path, which: Callable[[Path, Base, str], Path] = whole) -> Path:
    """Return a broken copy of the case's checkpoint at `place`; with `which`, of its unpatched twin."""
    shutil.copytree(which(root, case.base, case.layout), place)
    for number, edit in enumerate(case.edits):
        try:
            edit.apply(place)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            if number == 0 and which is whole:
                raise
            # else there is nothing left to break: the first of two edits took it, or the twin does not have it
    if case.unprivileged and os.geteuid() == 0:
        for path in (place.parent, place, *place.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    return place
