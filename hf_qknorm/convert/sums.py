"""Sums over a text of one norm's inputs and outputs, from which gains follow in closed form for any knee."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_qknorm.model.knees import centred_and_size
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.ops.norms import NORMS
from hf_qknorm.stats.distributed import Ranks

STEP = math.log(2) / 2  # between the logarithms of two e that sums are kept for
MARGIN = 4.0  # the mean size of vectors may differ by this factor from the one that the sums are planned for


class Sizes:
    """The mean |x|ᵖ over tokens and heads of the vectors x that arrive at a norm (if centred: without their mean)."""

    def __init__(self) -> None:
        self.total = torch.zeros(2, dtype=torch.float64)  # Σ mean |x|ᵖ, vectors

    def add(self, size: Tensor) -> None:
        """Count the vectors whose mean |x|ᵖ is `size` `[N, H]`."""
        self.total += torch.stack([size.sum().cpu().double(), torch.tensor(float(size.numel()))])

    @property
    def mean(self) -> float:
        """The mean; 0 where nothing arrived."""
        return float(self.total[0] / self.total[1].clamp_min(1))


class NormSums:
    """Sums over tokens of n², n·x, n, x and 1, per head and channel, of a norm's inputs x and outputs n, in fp64.

    n = y·(mean |y|ᵖ + e)^(−1/p)·c with y = x, or x without its mean; e = ε^(p/2) is knee·P beside the scheme's own, and
    P, the mean |y|ᵖ, is known when the text is over. So the sums are kept for a geometric row of e about the size that
    P is expected to have, of n·e^(1/p)/c, and are interpolated over log e: to 1e-4 of a gain. The first e is that of
    knee 0, which is exact.
    """

    def __init__(self, norm: HeadNorm, knees: Sequence[float], expected: float) -> None:
        self.norm, self.sizes = norm, Sizes()
        self.floor = norm.floor ** (norm.order / 2)
        self.row = torch.tensor([self.floor], dtype=torch.float64)
        wanted = [knee * max(expected, self.floor) for knee in knees if knee > 0]
        if wanted:
            first, last = math.log(min(wanted) / MARGIN) - STEP, math.log(max(wanted) * MARGIN) + 2 * STEP
            row = torch.arange(first, last, STEP, dtype=torch.float64).exp()
            self.row = torch.cat([self.row, row])
        self.sums = [torch.zeros((), dtype=torch.float64)] * 5

    def add(self, x: Tensor) -> None:
        """Count the vectors x `[N, H, D]`."""
        x = x.float() if x.device.type == "mps" else x.double()
        y, size = centred_and_size(self.norm, x)
        self.sizes.add(size)
        e = self.row.to(x)[:, None, None]
        share = (e / (size + e)) ** (1 / self.norm.order)  # [J, N, H]
        new = (
            torch.einsum("jnh,nhd->jhd", share * share, y * y),
            torch.einsum("jnh,nhd->jhd", share, y * x),
            torch.einsum("jnh,nhd->jhd", share, y),
            x.sum(0),
            torch.ones_like(x).sum(0),
        )
        self.sums = [old + sums.cpu().double() for old, sums in zip(self.sums, new, strict=True)]

    def holds(self, knee: float) -> bool:
        """Whether the sums can be interpolated for this knee: its e is inside of the row."""
        e = self.floor + knee * self.sizes.mean
        return knee == 0 or self.sizes.mean == 0 or float(self.row[2]) <= e <= float(self.row[-2])

    def at(self, knee: float) -> list[Tensor]:
        """The five sums, `[H, D]`, for this knee."""
        p, norm = self.norm.order, self.norm
        e = self.floor + knee * self.sizes.mean
        weights = _lagrange(self.row[1:], e) if knee else torch.ones(1, dtype=torch.float64)
        of_knee = slice(1, None) if knee else slice(0, 1)
        nn, nx, n = (torch.einsum("j,jhd->hd", weights, x[of_knee]) for x in self.sums[:3])
        width = self.sums[3].shape[-1]
        factor = e ** (-1 / p) * (width ** (-1 / p) if NORMS[norm.norm].summed else 1.0)
        return [nn * factor**2, nx * factor, n * factor, *self.sums[3:]]

    def solve(self, knee: float, shape: Sequence[int], bias: bool, ranks: Ranks) -> tuple[Tensor, Tensor]:
        """The least-squares gain and bias of x ≈ gain·n + bias, for a gain of `shape`: `[H, D]`, `[D]` or `[1]`."""
        sums = self.at(knee)
        if len(shape) == 1:
            over = (0,) if shape[0] == sums[0].shape[1] else (0, 1)
            sums = [ranks.sum_over_heads(x.sum(over, keepdim=True)) for x in sums]
        nn, nx, n, x, count = sums
        if bias:
            nn, nx = nn - n * n / count, nx - n * x / count
        gain = torch.where(nn > 0, nx / nn.clamp_min(torch.finfo(nn.dtype).tiny), 1.0)
        offset = (x - gain * n) / count if bias else torch.zeros_like(gain)
        return gain.reshape(*shape), offset.reshape(*shape)


def _lagrange(row: Tensor, e: float) -> Tensor:
    """Weights of the values at a geometric `row`, for the cubic through the four that are next to e in logarithms."""
    place = (math.log(e) - math.log(float(row[0]))) / STEP
    first = min(max(int(place) - 1, 0), len(row) - 4)
    weights = torch.zeros(len(row), dtype=torch.float64)
    for i in range(first, first + 4):
        weights[i] = math.prod((place - j) / (i - j) for j in range(first, first + 4) if j != i)
    return weights
