"""Random heads and the error budget, for tests and benchmarks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


def make_qkv(
    batch: int,
    heads: int,
    heads_kv: int,
    queries: int,
    keys: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    spread: float = 1.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q `[B, H, T, D]` and k, v `[B, Hk, S, D]` that need gradients; `spread` is the deviation of q and k."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, length: int, factor: float) -> Tensor:
        x = torch.randn(batch, heads, length, head_dim, generator=generator, dtype=torch.float64) * factor
        return x.to(dtype).requires_grad_()

    return draw(heads, queries, spread), draw(heads_kv, keys, spread), draw(heads_kv, keys, 1.0)


def error(actual: Tensor, exact: Tensor) -> float:
    """The relative error of `actual` in the Frobenius norm."""
    exact = exact.double()
    return float((actual.double() - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float64).tiny))


class Verdict(NamedTuple):
    """The relative error of one result, and the largest that is allowed; NaN never passes."""

    error: float
    budget: float

    @property
    def passed(self) -> bool:
        return self.error <= self.budget


def verdict(actual: Tensor, exact: Tensor, eager: Tensor) -> Verdict:
    """Whether err(actual) ≤ 2·err(eager) + one rounding of the output, both against `exact` in fp64.

    `eager` is the plain computation in the dtype of `actual`, on the same rounded inputs.

    The gradient of a parameter of few numbers is a sum over many rows, in which errors may cancel by chance. For such
    an `actual` pass the terms of the sum: `exact` and `eager` `[B, T, H, D]` for a gain `[1]`, `[D]` or `[H, D]`, in
    general what `sum_to_size` reduces to the shape of `actual`. Errors are then relative to the size of the terms,
    √Σ term², where that is more than the sum, and eager's is what its errors in the terms come to without chance.

    An error in n numbers may be 1 + 4/√n of its deviations, which is more than 2 for n < 16.
    """
    exact, eager = exact.double(), eager.double()
    total, eager_total = exact.sum_to_size(actual.shape), eager.sum_to_size(actual.shape)
    size = max(float(total.norm()), float(exact.norm()), torch.finfo(torch.float64).tiny)
    noise = float((eager_total - total).norm())
    if exact.shape != actual.shape:
        noise = max(noise, _noise_of_sum(exact, eager))
    deviations = max(2.0, 1 + 4 / math.sqrt(max(actual.numel(), 1)))
    found = float((actual.double() - total).norm())
    return Verdict(found / size, deviations * noise / size + torch.finfo(actual.dtype).eps)


def _noise_of_sum(exact: Tensor, eager: Tensor) -> float:
    """What independent errors of the terms come to: √Σ error², as found and as typical of terms of their size.

    The second counts where few terms outweigh all others and eager happens to be exact in these. Typical is the median
    of |error| / |term|, times 1.48 as that of a Gaussian, over all terms but the very small ones.
    """
    missed = eager - exact
    counts = exact.abs() > 0.01 * exact.square().mean().sqrt()
    typical = (missed[counts] / exact[counts]).abs().median() if counts.any() else missed.new_zeros(())
    return max(float(missed.norm()), 1.48 * float(typical) * float(exact.norm()))


def assert_within_budget(actual: Tensor, exact: Tensor, eager: Tensor, what: str = "result") -> None:
    """Raise AssertionError unless `actual` is finite and its `verdict` is passed."""
    if not torch.isfinite(actual).all():
        raise AssertionError(f"{what}: not finite")
    found = verdict(actual, exact, eager)
    if not found.passed:
        raise AssertionError(f"{what}: relative error {found.error:.2e} is over the budget of {found.budget:.2e}")
