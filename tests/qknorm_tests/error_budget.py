"""The error of a result, and the assertion that it is within its budget."""

import torch
from torch import Tensor

from hf_qknorm.ops.error_budget import verdict


def error(actual: Tensor, exact: Tensor) -> float:
    """Return the relative error of `actual` in the Frobenius norm."""
    exact = exact.double()
    return float((actual.double() - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float64).tiny))


def assert_within_budget(actual: Tensor, exact: Tensor, eager: Tensor, what: str = "result") -> None:
    """Raise AssertionError unless `actual` is finite and within the budget of `verdict`."""
    if not torch.isfinite(actual).all():
        raise AssertionError(f"{what}: not finite")
    found = verdict(actual, exact, eager)
    if not found.passed:
        raise AssertionError(f"{what}: relative error {found.error:.2e} is over the budget of {found.budget:.2e}")
