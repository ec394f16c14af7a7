"""Sums over a text of one norm's inputs and outputs, which give its gain in closed form for any knee."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_qknorm.model.knees import centred_and_size
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.ops.norms import NORMS
from hf_qknorm.stats.distributed import Ranks

LOG_STEP = math.log(2) / 2  # between the logarithms of neighbouring points of the grid
MARGIN = 4.0  # the text's mean |x|ᵖ may differ by this factor from the expected one


class Mean:
    """The mean of numbers that arrive in parts, summed in fp64."""

    def __init__(self) -> None:
        self.total = torch.zeros(2, dtype=torch.float64)  # their sum, their count

    def add(self, values: Tensor) -> None:
        """Add the numbers in `values`, of any shape."""
        self.total += torch.stack([values.sum().cpu().double(), torch.tensor(float(values.numel()))])

    @property
    def value(self) -> float:
        """The mean; 0 without numbers."""
        return float(self.total[0] / self.total[1].clamp_min(1))


class NormSums:
    """Sums over tokens of n², n·x, n, x and 1, per head and channel, of a norm's inputs x and outputs n, in fp64.

    n = y·(mean |y|ᵖ + e)^(−1/p)·c with y = x, or x − mean x if centred. e = ε^(p/2) is knee·P plus the scheme's own,
    where P, the mean of mean |y|ᵖ over the text (`power`), is known only at the end of the text. The sums are
    therefore of n·e^(1/p)/c at a geometric grid of e around the `expected` P, and are interpolated in log e, with an
    error of 1e-4 of a gain. The first point of the grid is knee 0, which is exact.
    """

    def __init__(self, norm: HeadNorm, knees: Sequence[float], expected: float) -> None:
        self.norm, self.power = norm, Mean()
        self.floor = norm.scheme_eps ** (norm.order / 2)
        self.grid = torch.tensor([self.floor], dtype=torch.float64)
        wanted = [knee * max(expected, self.floor) for knee in knees if knee > 0]
        if wanted:
            first, last = math.log(min(wanted) / MARGIN) - LOG_STEP, math.log(max(wanted) * MARGIN) + 2 * LOG_STEP
            self.grid = torch.cat([self.grid, torch.arange(first, last, LOG_STEP, dtype=torch.float64).exp()])
        self.sums = [torch.zeros((), dtype=torch.float64)] * 5

    def add(self, x: Tensor) -> None:
        """Add the vectors x `[N, H, D]`."""
        x = x.float() if x.device.type == "mps" else x.double()
        y, size = centred_and_size(self.norm, x)
        self.power.add(size)
        e = self.grid.to(x)[:, None, None]
        scale = (e / (size + e)) ** (1 / self.norm.order)  # [J, N, H]
        new = (
            torch.einsum("jnh,nhd->jhd", scale * scale, y * y),
            torch.einsum("jnh,nhd->jhd", scale, y * x),
            torch.einsum("jnh,nhd->jhd", scale, y),
            x.sum(0),
            torch.ones_like(x).sum(0),
        )
        self.sums = [old + part.cpu().double() for old, part in zip(self.sums, new, strict=True)]

    def covers(self, knee: float) -> bool:
        """Whether the grid reaches the e of this knee on both sides, as interpolation needs."""
        e = self.floor + knee * self.power.value
        return knee == 0 or self.power.value == 0 or float(self.grid[2]) <= e <= float(self.grid[-2])

    def at(self, knee: float) -> list[Tensor]:
        """The five sums `[H, D]` at this knee."""
        e = self.floor + knee * self.power.value
        weights = _cubic_weights(self.grid[1:], e) if knee else torch.ones(1, dtype=torch.float64)
        points = slice(1, None) if knee else slice(0, 1)
        nn, nx, n = (torch.einsum("j,jhd->hd", weights, x[points]) for x in self.sums[:3])
        p, width = self.norm.order, self.sums[3].shape[-1]
        factor = e ** (-1 / p) * (width ** (-1 / p) if NORMS[self.norm.norm].summed else 1.0)
        return [nn * factor**2, nx * factor, n * factor, *self.sums[3:]]

    def solve(self, knee: float, shape: Sequence[int], bias: bool, ranks: Ranks) -> tuple[Tensor, Tensor]:
        """The least-squares gain and bias of x ≈ gain·n + bias, for a gain of shape `[H, D]`, `[D]` or `[1]`."""
        sums = self.at(knee)
        if len(shape) == 1:
            axes = (0,) if shape[0] == sums[0].shape[1] else (0, 1)
            sums = [ranks.over_heads(x.sum(axes, keepdim=True)) for x in sums]
        nn, nx, n, x, count = sums
        if bias:
            nn, nx = nn - n * n / count, nx - n * x / count
        gain = torch.where(nn > 0, nx / nn.clamp_min(torch.finfo(nn.dtype).tiny), 1.0)
        offset = (x - gain * n) / count if bias else torch.zeros_like(gain)
        return gain.reshape(*shape), offset.reshape(*shape)


def _cubic_weights(grid: Tensor, e: float) -> Tensor:
    """Weights `[J]` of the values on a geometric grid: the cubic in log e through the four points nearest to e."""
    place = (math.log(e) - math.log(float(grid[0]))) / LOG_STEP
    first = min(max(int(place) - 1, 0), len(grid) - 4)
    weights = torch.zeros(len(grid), dtype=torch.float64)
    for i in range(first, first + 4):
        weights[i] = math.prod((place - j) / (i - j) for j in range(first, first + 4) if j != i)
    return weights
