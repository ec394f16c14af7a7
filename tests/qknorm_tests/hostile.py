"""Data from untrusted files: a report, and what a hostile file may hold in place of each of its parts."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from hf_qknorm import Calibration, Scheme
from hf_qknorm.reports.records import LayerReport, LayerStatistics, Prediction


def nested(depth: int) -> Any:
    """Return lists and mappings nested `depth` levels deep."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"q": value}
    return value


NASTY = (
    None, True, 0, -1, 1.5, 10**400, -(10**400), 2**64, math.nan, math.inf, 1e308, "", "auto", "x" * 10**5,
    "\n---\n# x", "\u202e<b>|`[x](javascript:y)", [], [None], {}, {"a": 1}, nested(2000),
)  # fmt: skip


def variants(made: Any) -> Iterator[Any]:
    """Yield `made` with each part, at any depth, replaced by each nasty value, removed, or beside an unknown key."""
    yield from NASTY
    keys = list(made) if isinstance(made, dict) else range(len(made)) if isinstance(made, list) else ()
    for key in keys:
        for value in variants(made[key]):
            changed = copy.copy(made)
            changed[key] = value
            yield changed
        if isinstance(made, dict):
            yield {other: value for other, value in made.items() if other != key}
    if isinstance(made, dict):
        yield made | {"unknown": 1}
        yield made | {"x" * 10**5: 1}


def changed(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of the data with another value at `path`, as "base/loss"; `...` removes the key."""
    *parents, last = path.split("/")
    copied = place = copy.deepcopy(data)
    for key in parents:
        place = place[key]
    place[last] = value
    if value is ...:
        del place[last]
    return copied


def as_json(data: Any) -> str:
    """The data as JSON; of data that Python can't write, a text as deep."""
    try:
        return json.dumps(data)
    except RecursionError:
        return "[" * 5000


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or None where it refused with a ValueError that tells something, in few words."""
    try:
        return call()
    except ValueError as error:
        told = str(error)
    assert 10 < len(told) < 3000
    return None


SIDE = LayerStatistics((60.0, 20.0), (0.5, 1.5), (0.1, 0.3), (0.02, 0.04), gain_q=2.0, bound=150.0)
LAYER = LayerReport(SIDE, SIDE)
REPORT = Calibration(
    10,
    Scheme(q="rms"),
    50.0,
    Prediction(1.0),
    Prediction(3.0),
    Prediction(2.0),
    {"layers.0": LAYER},
    knee=4.0,
    knees={0.0: Prediction(1.5), 4.0: Prediction(2.0, 0.1, 0.9)},
)
