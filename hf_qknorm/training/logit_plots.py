"""The plot of a `LogitMonitor` log: maps of layers × steps, and curves of the worst heads and of the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from hf_qknorm.measure import plotting
from hf_qknorm.training.logit_log import LogitSample

Samples = Sequence[LogitSample]

WORST = 6  # heads with a curve
CURVES = ("#c8553d", "#2a7f9e", "#4d4d4d", "#d99a2b", "#7a5195", "#5b8c5a")
OUTPUTS = {"rms_qkv": "queries, keys, values", "rms_out": "attention output", "rms_mlp": "MLP output"}
DEPTH = "viridis"  # of the outputs' curves, one per layer
DRAWN = 400  # columns: of a longer log, a column shows the worst of several samples


def draw_log(samples: Samples, path: str | Path) -> None:
    """Draw the samples from `read_log` as a PNG at `path`.

    The maps show the worst head of each layer: dark cells are at risk. Colours depend on the cap and on the entropy of
    uniform attention. The curves below show the heads with the largest |logit| and with the least entropy. The
    last row has the root mean square of each layer's outputs.

    Raises ValueError without a sample.
    """
    if not samples:
        raise ValueError("there is nothing to draw: the log holds no sample yet")
    layers = list(dict.fromkeys(name for sample in samples for name in sample.layers))
    last = next(iter(samples[-1].layers.values()))
    uniform = max(0.1, *(layer.even for sample in samples for layer in sample.layers.values()))
    shape = f"{len(layers)} layers of {len(last.max_logit)} heads"
    title = f"{len(samples)} samples of steps {samples[0].step} to {samples[-1].step}"
    height = min(max(8.0 + 0.2 * len(layers), 9.0), 14.6)
    figure = plotting.new_figure(12, height, f"Attention in training: {shape}, {title}")
    grid = figure.add_gridspec(3, 6, height_ratios=(max(0.2 * len(layers), 1.2), 2.6, 2.6))
    maps, curves = ([figure.add_subplot(grid[row, half]) for half in (slice(0, 3), slice(3, 6))] for row in (0, 1))
    size = -(-len(samples) // DRAWN)
    columns = [samples[i : i + size] for i in range(0, len(samples), size)]
    logits, entropies = _rows(columns, layers, "max_logit", max), _rows(columns, layers, "entropy", min)
    plotting.draw_logits(figure, maps[0], logits, last.cap, "largest |logit| of the worst head, before any cap")
    plotting.draw_entropies(figure, maps[1], entropies, uniform, "attention entropy of the sharpest head (nats)")
    for axes in maps:
        ticks = plotting.spread_ticks(len(columns), 10)
        axes.set_xticks(ticks, labels=[str(columns[i][-1].step) for i in ticks])
        axes.set_xlabel("step", color=plotting.INK)
        axes.set_ylabel("layer", color=plotting.INK)
    _curves(curves[0], samples, layers, "max_logit", lambda values: -max(values))
    _curves(curves[1], samples, layers, "entropy", min)
    label = "largest |logit|"
    for limit, style, look in ((last.cap, ":", "dotted"), (2 * last.cap, "--", "dashed")):
        if curves[0].get_ylim()[1] > limit:
            curves[0].axhline(limit, color=plotting.GRID, linewidth=1, linestyle=style)
            label += f", {look}: {limit:g}"
    plotting.finish_axes(curves[0], "step", label, size=8)
    plotting.finish_axes(curves[1], "step", "attention entropy (nats)", size=8)
    for i, (field, title) in enumerate(OUTPUTS.items()):
        _outputs(figure.add_subplot(grid[2, 2 * i : 2 * i + 2]), samples, layers, field, title)
    plotting.save_figure(figure, path)


def _rows(
    columns: Sequence[Samples], layers: Sequence[str], field: str, worst: Callable[..., float]
) -> list[list[float]]:
    """A row per layer with the worst number in each column; NaN where there is none."""

    def cell(column: Samples, name: str) -> float:
        found = [plotting.drawable(getattr(sample.layers[name], field)) for sample in column if name in sample.layers]
        return worst(plotting.known(chain(*found)), default=math.nan)

    return [[cell(column, name) for column in columns] for name in layers]


def _outputs(axes: Any, samples: Samples, layers: Sequence[str], field: str, title: str) -> None:
    """Draw the rms of an output over the steps, a curve per layer from dark (first) to light; a note without any."""
    curves: dict[int, tuple[list[int], list[float]]] = {}  # by layer
    for i, name in enumerate(layers):
        found = [(sample.step, getattr(sample.layers[name], field)) for sample in samples if name in sample.layers]
        found = [(step, value) for step, value in found if value is not None]
        values = plotting.drawable(value for _, value in found)
        if any(value > 0 for value in values):
            curves[i] = [step for step, _ in found], values
    for i, (steps, values) in curves.items():
        colour = colormaps[DEPTH](0.9 * i / max(len(layers) - 1, 1))
        label = f"layer {i}" if i in (min(curves), max(curves)) else None
        axes.plot(steps, values, color=colour, label=label, **_style(steps, 1.2))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10]))
    if curves:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        plotting.legend_above(axes, size=8, columns=2)
    else:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=plotting.INK)
    plotting.finish_axes(axes, "step", f"rms: {title}", size=8)


def _curves(axes: Any, samples: Samples, layers: Sequence[str], field: str, rank: Callable[..., float]) -> None:
    """Draw the curves of the heads that rank first in any sample."""
    points: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for sample in samples:
        for name, layer in sample.layers.items():
            for head, value in enumerate(plotting.drawable(getattr(layer, field))):
                points.setdefault((name, head), []).append((sample.step, value))
    values = {head: plotting.known(value for _, value in found) for head, found in points.items()}
    worst = sorted((head for head in points if values[head]), key=lambda head: rank(values[head]))[:WORST]
    for (name, head), colour in zip(worst, CURVES, strict=False):
        steps, curve = zip(*points[name, head], strict=True)
        label = f"layer {layers.index(name)}, head {head}"
        axes.plot(steps, curve, color=colour, label=label, **_style(steps, 1.4))
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    if worst:
        plotting.legend_above(axes, size=8, columns=3)


def _style(steps: Sequence[int], width: float) -> dict[str, Any]:
    """The look of a curve: few steps have markers, as a single one has no line."""
    return {"linewidth": width, "marker": "o" if len(steps) < 40 else "", "markersize": 3}
