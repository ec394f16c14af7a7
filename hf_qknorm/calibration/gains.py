"""Gains in closed form for any knee, from one pass of text through the unpatched model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.files.progress import progress_bar
from hf_qknorm.measure.batches import Batch, Batches, is_real, model_inputs
from hf_qknorm.model.attention import QKNormAttention, head_norms, patched_layers
from hf_qknorm.model.fold import set_spread
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.model.knees import centred_and_size
from hf_qknorm.model.norms import NORM_FIELDS, HeadNorm
from hf_qknorm.norms import NORMS, PLAIN, Shape

LOG_STEP = math.log(2) / 2  # between the logarithms of neighbouring points of the grid
MARGIN = 4.0  # the text's mean |x|ᵖ may differ by this factor from the expected one

NormKey = tuple[str, str]  # a layer's name, and the name of a norm in it


class Mean:
    """The mean of numbers that arrive in parts, summed in fp64."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def add(self, values: Tensor) -> None:
        """Add the numbers in `values`, of any shape."""
        self.sum += float(values.sum())
        self.count += values.numel()

    @property
    def value(self) -> float:
        """The mean; 0 without numbers."""
        return self.sum / max(self.count, 1)


class NormSums:
    """Sums over tokens of n², n·x, n, x and 1, per head and channel, of a norm's inputs x and outputs n, in fp64.

    n = y·(mean |y|ᵖ + e)^(−1/p)·c with y = x, or x − mean x if centred, and c of the norm's shape. e = ε^(p/2) depends
    on P, the mean of mean |y|ᵖ over the text (`power`), which is known only at the end of the text. The sums are
    therefore of n·e^(1/p)/c at a geometric grid of e around the `expected` P, and are interpolated in log e, with an
    error of 1e-4 of a gain. The first point of the grid is knee 0, which is exact.

    A sharp norm with a knee needs P alone: nearly all vectors keep their length with a gain of 1, and a fit to the long
    ones would only raise the bound. For an export (`exportable`) each ε is eps times a power of 4, and gains carry the
    length.
    """

    def __init__(
        self, norm: HeadNorm, knees: Sequence[float], expected: float, sharpness: float, exportable: bool
    ) -> None:
        if not math.isfinite(expected):
            raise ValueError(f"the inputs of a norm have a mean |x|ᵖ of {expected}: are the model's weights finite?")
        self.norm, self.power, self.sharpness, self.exportable = norm, Mean(), sharpness, exportable
        self.floor = norm.eps ** (norm.order / 2)
        self.grid = torch.tensor([self.floor], dtype=torch.float64, device="cpu")
        wanted = [knee * max(expected, self.floor) for knee in knees if knee > 0 and sharpness == 1]
        if wanted:
            first, last = math.log(min(wanted) / MARGIN) - LOG_STEP, math.log(max(wanted) * MARGIN) + 2 * LOG_STEP
            points = torch.arange(first, last, LOG_STEP, dtype=torch.float64, device="cpu")
            self.grid = torch.cat([self.grid, points.exp()])
        self.sums = [torch.zeros((), dtype=torch.float64, device="cpu")] * 5

    def add(self, x: Tensor) -> None:
        """Add heads `[N, H, D]`."""
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

    def shape(self, knee: float) -> Shape:
        """The norm's shape at this knee. Without one, and for an export, the gains carry the length."""
        if not knee:
            return PLAIN
        shape = self.norm.rounded(knee, self.power.value, self.sharpness)
        return Shape(2.0 * round(shape.epsilon / 2)) if self.exportable else shape

    def e(self, knee: float) -> float:
        """ε^(p/2) at this knee."""
        return float((self.norm.eps * 2.0 ** self.shape(knee).epsilon) ** (self.norm.order / 2))

    def covers(self, knee: float) -> bool:
        """Whether the grid reaches the e of this knee on both sides, as interpolation needs."""
        exact = knee == 0 or self.sharpness > 1 or self.power.value == 0
        return exact or float(self.grid[2]) <= self.e(knee) <= float(self.grid[-2])

    def at(self, knee: float) -> list[Tensor]:
        """The five sums `[H, D]` at this knee."""
        e = self.e(knee)
        weights = _cubic_weights(self.grid[1:], e) if knee else torch.ones_like(self.grid[:1])
        points = slice(1, None) if knee else slice(0, 1)
        nn, nx, n = (torch.einsum("j,jhd->hd", weights, x[points]) for x in self.sums[:3])
        factor = e ** (-1 / self.norm.order) * self.norm.length(self.shape(knee))
        return [nn * factor**2, nx * factor, n * factor, *self.sums[3:]]

    def solve(self, knee: float, shape: Sequence[int], bias: bool) -> tuple[Tensor, Tensor]:
        """The gain and bias of x ≈ gain·n + bias, for a gain of shape `[H, D]`, `[D]` or `[1]`; see the class."""
        sharp = knee > 0 and self.sharpness > 1
        sums = self.at(0.0 if sharp else knee)
        if len(shape) == 1:
            axes = (0,) if shape[0] == sums[0].shape[1] else (0, 1)
            sums = [x.sum(axes, keepdim=True) for x in sums]
        nn, nx, n, x, count = sums
        if sharp:  # the bias is the mean that the norm takes off
            centred = bias and NORMS[self.norm.norm].centred
            offset = (x / count).mean(-1, keepdim=True).expand_as(x) if centred else torch.zeros_like(x)
            return x.new_ones(*shape), offset.reshape(*shape)
        if bias:
            nn, nx = nn - n * n / count, nx - n * x / count
        gain = torch.where(nn > 0, nx / nn.clamp_min(torch.finfo(nn.dtype).tiny), 1.0)
        return gain.reshape(*shape), ((x - gain * n) / count if bias else torch.zeros_like(gain)).reshape(*shape)


class ClosedFormGains:
    """The sums of every norm of a patched model over a text, and the gains that follow from them for any knee.

    The text takes one pass through the unpatched model, after one of its `sample`, whose mean |x|ᵖ the grids are
    around; sharp norms need none. Where the text's are more than four times larger or smaller, there is a second pass.
    `exportable` is for norms of order 2 and a sharpness of 1.
    """

    def __init__(
        self,
        model: Any,
        batches: Batches,
        sample: Batches,
        knees: Sequence[float],
        sharpness: float = 1.0,
        exportable: bool = False,
    ) -> None:
        self.model = model
        norms = named_norms(model)
        powers = dict.fromkeys(norms, 0.0)
        for text in (*([sample] if sharpness == 1 else []), batches, batches):
            tried = () if text is sample else knees
            self.sums = {key: NormSums(norm, tried, powers[key], sharpness, exportable) for key, norm in norms.items()}
            with observed_inputs(model, {found.norm: found.add for found in self.sums.values()}) as run:
                for batch in progress_bar(text, desc="gains", unit="batch"):
                    run(batch)
            powers = {key: found.power.value for key, found in self.sums.items()}
            if text is batches and all(found.covers(knee) for found in self.sums.values() for knee in knees):
                break

    def apply(self, knee: float) -> None:
        """Set this knee, and the gains and biases that fit it. Raises ValueError for a mean that is not finite."""
        for found in self.sums.values():
            found.norm.set_shape(found.shape(knee))
        for name, layer in patched_layers(self.model).items():
            self._set_gains(name, layer, knee)

    @torch.no_grad()
    def _set_gains(self, name: str, layer: QKNormAttention, knee: float) -> None:
        """Write a layer's gains; q's includes the change of the logits' scale, and the gain of keys without one."""
        norms = head_norms(layer)
        scaled = "q" if "q_norm" in norms else "k"
        if not all(self.sums[name, x].sums[0].dim() for x in norms):  # unused: the cross-attention of a decoder alone
            return
        for norm_name, norm in norms.items():
            if norm.weight is None:
                continue
            gain, bias = self.sums[name, norm_name].solve(knee, norm.weight.shape, norm.bias is not None)
            factor = layer.own_scale / layer.logit_scale if NORM_FIELDS[norm_name] == scaled else 1.0
            if norm_name == "q_norm" and "k_norm" in norms and norms["k_norm"].weight is None:
                keys, _ = self.sums[name, "k_norm"].solve(knee, (1,), False)
                factor *= float(keys)
            norm.weight.copy_(gain * factor)
            if norm.bias is not None:
                norm.bias.copy_(bias * factor)


def named_norms(model: nn.Module) -> dict[NormKey, HeadNorm]:
    """The norms of a patched model by their layer's name and their own."""
    layers = patched_layers(model).items()
    return {(layer_name, name): norm for layer_name, layer in layers for name, norm in head_norms(layer).items()}


def rescale_folded_weights(model: Any, batches: Batches) -> None:
    """Rescale the projections behind folded norms, so that their biases are right for the text's mean σ."""
    sigmas = {layer: Mean() for layer in patched_layers(model).values()}

    def observe(layer: Any, x: Tensor) -> None:
        sigmas[layer].add(layer.removed_norm[0].sigma(x).double())

    with observed_inputs(model, {layer.removed_norm[0]: partial(observe, layer) for layer in sigmas}) as run:
        for batch in batches:
            run(batch)
    for layer, sigma in sigmas.items():
        set_spread(layer, sigma.value)


@contextmanager
def observed_inputs(
    model: Any, observers: Mapping[nn.Module, Callable[[Tensor], None]]
) -> Iterator[Callable[[Batch], None]]:
    """Yield `run(batch)`: a pass of the unpatched model; each module's observer gets its inputs.

    Inputs are `[N, ...]`, a row for each token that is not padding.
    """
    real: Tensor | None = None  # None for all
    without_logits = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}

    def observe(observer: Callable[[Tensor], None], module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach().flatten(0, 1)
        observer(x if real is None else x[real.to(x.device)])

    @torch.no_grad()
    def run(batch: Batch) -> None:
        nonlocal real
        real = is_real(batch).flatten() if "attention_mask" in batch and "input_ids" in batch else None
        with as_unpatched(model):
            model(**model_inputs(model, batch), **without_logits, use_cache=False)

    with ExitStack() as hooks:
        for module, observer in observers.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(observe, observer)))
        yield run


def _cubic_weights(grid: Tensor, e: float) -> Tensor:
    """Weights `[J]` of the values on a geometric grid: the cubic in log e through the four points nearest to e."""
    place = (math.log(e) - math.log(float(grid[0]))) / LOG_STEP
    first = min(max(int(place) - 1, 0), len(grid) - 4)
    weights = torch.zeros_like(grid)
    for i in range(first, first + 4):
        weights[i] = math.prod((place - j) / (i - j) for j in range(first, first + 4) if j != i)
    return weights
