"""Paired differences: mean, standard error, and the verdicts that they support."""

from __future__ import annotations

import math

import pytest
from paired import Difference, standard_error

NAN, INF = math.nan, math.inf


def test_a_difference_is_that_of_pairs():
    apart = Difference.of([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    assert (apart.mean, apart.error) == (2.0, pytest.approx(1 / math.sqrt(3)))
    assert Difference.of([2.0, 9.0], [1.0, 8.0]) == Difference(1.0, 0.0)  # the spread of both alone does not count
    assert -apart == Difference.of([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])
    with pytest.raises(ValueError, match="shorter"):
        Difference.of([2.0, 3.0], [1.0])


@pytest.mark.parametrize("values", [[1.0], [1.0, NAN], [1.0, INF], [INF, INF, 2.0]])
def test_there_is_no_error_of_one_value_or_of_one_that_is_not_finite(values):
    assert math.isnan(standard_error(values))
    apart = Difference.of(values, [0.0] * len(values))
    assert math.isnan(apart.error)
    assert not apart.above(0)


@pytest.mark.parametrize(
    ("losses", "others", "verdict"),
    [
        ([1.0, 1.1, 0.9], [1.2, 1.29, 1.11], "better"),
        ([1.2, 1.29, 1.11], [1.0, 1.1, 0.9], "worse"),
        ([1.0, 1.5], [1.2, 1.2], "level"),
        ([1.0, 1.0], [1.0, 1.0], "level"),
        ([1.0], [2.0], "level"),  # one seed has no spread
        ([1.0, NAN], [2.0, 2.0], "diverged"),
    ],
)
def test_the_verdict_on_losses(losses, others, verdict):
    assert Difference.of(losses, others).verdict == verdict
