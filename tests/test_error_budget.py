"""The error budget accepts rounding errors and rejects faults, in results of many numbers and of few."""

import pytest
import torch
from torch import Tensor

from qknorm_tests.error_budget import assert_within_budget

EPS = torch.finfo(torch.float32).eps
ROWS = (2, 50, 3, 16)  # the terms of a gain's gradient
SHAPES = [(1,), (16,), (3, 16)]
DRAWS = range(30)


def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
    """x with relative errors of a few roundings in fp32."""
    return x * (1 + 3 * EPS * torch.randn(x.shape, generator=generator, dtype=torch.float64))


def draw(seed: int, mean: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """The terms of a sum, and two computations of them with independent errors."""
    generator = torch.Generator().manual_seed(seed)
    terms = torch.randn(ROWS, generator=generator, dtype=torch.float64) + mean
    return terms, noisy(terms, generator), noisy(terms, generator)


def summed(terms: Tensor, shape: tuple[int, ...]) -> Tensor:
    return terms.sum_to_size(shape).float()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mean", [0.3, 0.0])
def test_sums_pass_with_any_cancellation_by_chance(shape: tuple[int, ...], mean: float) -> None:
    for seed in DRAWS:
        exact, eager, other = draw(seed, mean)
        assert_within_budget(summed(other, shape), exact, eager)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mean", [0.3, 0.0])
def test_a_lost_tile_is_over_the_budget_of_a_sum(shape: tuple[int, ...], mean: float) -> None:
    for seed in DRAWS:
        exact, eager, other = draw(seed, mean)
        other[:, 32:48] = 0.0
        with pytest.raises(AssertionError, match=r"gain: relative error .* is over the budget"):
            assert_within_budget(summed(other, shape), exact, eager, "gain")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_over_every_budget(bad: float) -> None:
    exact, eager, _ = draw(0)
    with pytest.raises(AssertionError, match="out: not finite"):
        assert_within_budget(torch.full(ROWS, bad), exact, eager, "out")
