"""The error budget accepts rounding errors and rejects faults, in results of many numbers and of few."""

from __future__ import annotations

import pytest
import torch
from error_budget import assert_within_budget, verdict
from torch import Tensor

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


@pytest.mark.parametrize("share", [0.98, 1.02])
def test_the_budget_of_many_numbers_is_twice_eagers_error_and_one_rounding(share: float) -> None:
    exact, eager, _ = draw(0)
    missed = (eager - exact) / exact.norm()
    actual = exact + share * missed * (2 + EPS / missed.norm()) * exact.norm()
    found = verdict(actual.float(), exact, eager)
    assert found.passed == (share < 1)
    assert found.budget == pytest.approx(2 * float(missed.norm()) + EPS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mean", [0.3, 0.0])
def test_sums_pass_with_any_cancellation_by_chance(shape: tuple[int, ...], mean: float) -> None:
    for seed in DRAWS:
        exact, eager, other = draw(seed, mean)
        assert_within_budget(summed(other, shape), exact, eager)


def test_a_sum_passes_if_eager_is_exact_in_its_dominant_term() -> None:
    for seed in DRAWS:
        exact, eager, other = draw(seed)
        exact[0, 0, 0, 0], eager[0, 0, 0, 0], other[0, 0, 0, 0] = 1e3, 1e3, 1e3 * (1 + 6 * EPS)
        assert_within_budget(summed(other, (1,)), exact, eager)


def test_a_sum_of_zeros_must_be_zero() -> None:
    zeros = torch.zeros(ROWS)
    assert verdict(torch.zeros(1), zeros, zeros).passed
    assert not verdict(torch.full((1,), 1e-9), zeros, zeros).passed


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mean", [0.3, 0.0])
def test_a_lost_tile_is_over_the_budget_of_a_sum(shape: tuple[int, ...], mean: float) -> None:
    for seed in DRAWS:
        exact, eager, other = draw(seed, mean)
        other[:, 32:48] = 0.0
        with pytest.raises(AssertionError, match=r"gain: relative error .* is over the budget"):
            assert_within_budget(summed(other, shape), exact, eager, "gain")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_factor_of_a_thousandth_is_over_the_budget_of_a_sum(shape: tuple[int, ...]) -> None:
    for seed in DRAWS:
        exact, eager, other = draw(seed)
        assert not verdict(summed(1.001 * other, shape), exact, eager).passed


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_over_every_budget(bad: float) -> None:
    exact, eager, _ = draw(0)
    with pytest.raises(AssertionError, match="out: not finite"):
        assert_within_budget(torch.full(ROWS, bad), exact, eager, "out")


@pytest.mark.parametrize(("dominant", "factor"), [(1, 5.0), (4, 3.0), (16, 2.0), (64, 2.0)])
def test_the_factor_counts_the_numbers_that_dominate_a_result(dominant: int, factor: float) -> None:
    """The errors of few numbers scatter as much among many small ones as alone."""
    exact = torch.full((1000,), 1e-6, dtype=torch.float64)
    exact[:dominant] = 1.0
    eager = exact * (1 + 8 * EPS)
    found = verdict(exact.float(), exact, eager)
    assert found.budget == pytest.approx(factor * 8 * EPS + EPS, rel=1e-4)


@pytest.mark.parametrize("fault", [0.0, 0.5])
def test_numbers_below_the_normal_ones_are_rounded_to_fixed_steps(fault: float) -> None:
    exact = torch.linspace(1e-6, 2e-6, 50, dtype=torch.float64)
    found = verdict((exact * (1 + fault)).half(), exact, exact)
    assert found.error > torch.finfo(torch.float16).eps
    assert found.passed == (fault == 0)
