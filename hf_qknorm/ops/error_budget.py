"""The error budget of a result: err(actual) ≤ 2·err(eager) + one rounding, relative to the specification in fp64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """The relative error of a result and its budget; NaN is over any budget."""

    error: float
    budget: float

    @property
    def passed(self) -> bool:
        return self.error <= self.budget


def verdict(actual: Tensor, exact: Tensor, eager: Tensor) -> Verdict:
    """Compare errors: err(actual) ≤ 2·err(eager) + one rounding of the output, both relative to `exact` in fp64.

    `eager` is the plain computation in the dtype of `actual`, on the same rounded inputs. In a result of n < 16 numbers
    the factor is 1 + 4/√n instead of 2: few errors scatter more. Where a few numbers x are larger than the others, n is
    (Σ x²)² / Σ x⁴, the number of equal ones with the same scatter. Below the normal numbers of a dtype, such as 6e-5 of
    fp16, one rounding is a fixed step.

    For the gradient of a parameter, pass the terms of the sum that makes it as `exact` and `eager`: for a gain `[1]`,
    `[D]` or `[H, D]`, terms `[B, T, H, D]`, or any shape that `sum_to_size` reduces to the shape of `actual`. Errors of
    terms may cancel by chance, so the error of eager is at least √Σ error² over the terms, and errors are relative to
    the larger one of the sum's norm and √Σ term².
    """
    exact, eager = exact.double(), eager.double()
    total, eager_total = exact.sum_to_size(actual.shape), eager.sum_to_size(actual.shape)
    size = max(float(total.norm()), float(exact.norm()), torch.finfo(torch.float64).tiny)
    eager_error = float((eager_total - total).norm())
    if exact.shape != actual.shape:
        eager_error = max(eager_error, _error_of_terms(exact, eager))
    factor = max(2.0, 1 + 4 / math.sqrt(max(min(actual.numel(), _effective_count(exact)), 1)))
    actual_error = float((actual.double() - total).norm())
    info = torch.finfo(actual.dtype)
    underflow = info.tiny * info.eps * math.sqrt(actual.numel())  # the steps between numbers below the normal ones
    return Verdict(actual_error / size, (factor * eager_error + underflow) / size + info.eps)


def _effective_count(x: Tensor) -> float:
    """(Σ x²)² / Σ x⁴: the number of entries if all are equal, and 1 if one is far larger than the others."""
    shares = x.square() / x.square().sum().clamp_min(torch.finfo(x.dtype).tiny)
    return float(1 / shares.square().sum().clamp_min(torch.finfo(x.dtype).tiny))


def _error_of_terms(exact: Tensor, eager: Tensor) -> float:
    """√Σ error² over the terms: the larger one of the measured value and the typical one for terms of their size.

    The typical value matters where few terms dominate and eager happens to be exact in these. It is the median of
    |error| / |term| over all terms but the very small ones, times 1.48 (a Gaussian's deviation over its median).
    """
    errors = eager - exact
    large = exact.abs() > 0.01 * exact.square().mean().sqrt()
    typical = (errors[large] / exact[large]).abs().median() if large.any() else errors.new_zeros(())
    return max(float(errors.norm()), 1.48 * float(typical) * float(exact.norm()))
