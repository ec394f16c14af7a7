"""Few combinations of several axes that still bring every two values together: covering sets in place of full grids."""

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any


def covering(
    *axes: Iterable[Any], fits: Callable[..., bool] = lambda *row: True, strength: int = 2
) -> list[tuple[Any, ...]]:
    """Rows with a value of each axis in which every `strength` values of different axes meet, where a row `fits`.

    The next row is always the first of those that bring most values together for the first time.
    """
    values = [tuple(axis) for axis in axes]
    places = product(*(range(len(axis)) for axis in values))
    rows = {place: tuple(axis[i] for axis, i in zip(values, place, strict=True)) for place in places}
    met = {place: set(combinations(enumerate(place), strength)) for place, row in rows.items() if fits(*row)}
    chosen, missing = [], set().union(*met.values())
    while missing:
        place = max(met, key=lambda x: len(met[x] & missing))
        missing -= met[place]
        chosen.append(rows[place])
    return chosen
