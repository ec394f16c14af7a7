"""Differences of paired results: the mean over the pairs, and its standard error."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean; NaN for a single value, and for values that are not finite."""
    several = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.stdev(values) / len(values) ** 0.5 if several else math.nan


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and its standard error.

    `format(difference, ".2f")` shows both with these digits, and the sign of the mean; the default is ".3f". A
    single pair has no error to show.
    """

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float], others: Sequence[float]) -> Difference:
        """The values minus the others. Raises ValueError for different numbers of them."""
        apart = [a - b for a, b in zip(values, others, strict=True)]
        return cls(statistics.fmean(apart), standard_error(apart))

    def above(self, limit: float) -> bool:
        """Whether the mean is above the limit and above twice its standard error; False without an error."""
        return self.mean > limit and self.mean > 2 * self.error

    @property
    def verdict(self) -> str:
        """For losses: "better" or "worse" by more than twice the error, else "level"; "diverged" for a mean of NaN."""
        if math.isnan(self.mean):
            return "diverged"
        return "worse" if self.above(0) else "better" if (-self).above(0) else "level"

    def __neg__(self) -> Difference:
        return Difference(-self.mean, self.error)

    def __format__(self, digits: str) -> str:
        digits = digits or ".3f"
        spread = "" if math.isnan(self.error) else f" ± {self.error:{digits}}"
        return f"{self.mean:+{digits}}{spread}"

    def __str__(self) -> str:
        return format(self)
