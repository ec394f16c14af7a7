"""All figures, as PNG files: a calibration, an inspection, a monitor's log, and the demo; and their common style."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from hf_qknorm.files.atomic_io import replace_file
from hf_qknorm.files.formatting import format_fixed

if TYPE_CHECKING:
    from hf_qknorm.reports.inspection import Inspection
    from hf_qknorm.reports.logit_log import LogitSample
    from hf_qknorm.reports.report import Calibration

LARGEST = 1e12  # larger numbers are drawn here: axes overflow near the largest floats
COLUMNS = 400  # of a map of steps: in a longer log, a column shows the worst of several samples
LINEAR = 8.0  # an axis with doublings is linear up to this logit, because it has no place for 0
INK, GRID = "#333333", "#888888"
COLOURS = {"unpatched": "#4d4d4d", "fresh gains": "#c8553d", "calibrated": "#2a7f9e"}  # safe for colour blindness
DEMO = ("Converted: rise in loss", "Trained on: held-out loss", "Trained on: largest |logit|")

Rows = Sequence[Sequence[float]]  # by layer


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write the figure as a PNG; a failed run leaves the old file."""
    replace_file(Path(path), partial(figure.savefig, dpi=150, format="png"))


def finish_axes(axes: Any, xlabel: str, ylabel: str = "") -> None:
    """Set the labels, a light grid and small ticks; remove the frame at the top and on the right."""
    axes.set_xlabel(xlabel, color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.grid(alpha=0.25)
    axes.tick_params(length=2, colors=INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _legend_outside(figure: Figure, axes: Any, side: str) -> None:
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=9, ncols=4, labelcolor=INK, loc=f"outside {side} center")


def draw_calibration(report: Calibration, path: str | Path) -> None:
    """Draw every head's largest |logit| and entropy by layer, unpatched and converted.

    Marks show each layer's bound and the cap.
    """
    layers = list(report.layers.values())
    sides = {"unpatched": [layer.before for layer in layers], "calibrated": [layer.after for layer in layers]}
    figure = new_figure(9.5, min(max(1.9 + 0.3 * len(layers), 3.0), 11.0))
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, field, worst in ((left, "max_logit", max), (right, "entropy", min)):
        _draw_heads(axes, {name: [getattr(x, field) for x in side] for name, side in sides.items()}, worst)
    bounds = _drawable(math.nan if layer.after.bound is None else layer.after.bound for layer in layers)
    if places := {i: bound for i, bound in enumerate(bounds) if bound > 0}:  # NaN is not
        left.set_xscale("symlog", base=2, linthresh=LINEAR, linscale=0.4)
        left.xaxis.set_major_formatter("{x:g}")
        mark: dict[str, Any] = {"s": 90, "color": INK, "marker": "|", "linewidths": 2, "zorder": 2}
        left.scatter(list(places.values()), list(places), label="bound, for any input", **mark)
    if report.scheme.softcap is not None:
        left.axvline(report.cap, color=GRID, linewidth=1, linestyle="--", label=f"cap {report.cap:g}")
    left.set_ylim(len(layers) - 0.4, -0.6)
    left.set_yticks(_ticks(len(layers)))
    finish_axes(left, "largest |logit|, before any cap (large dot: worst head)", "layer")
    finish_axes(right, "attention entropy in nats (large dot: sharpest head)")
    for axes in (left, right):
        axes.set_xlim(left=0)
    _legend_outside(figure, left, "upper")
    save_figure(figure, path)


def _draw_heads(axes: Any, sides: Mapping[str, Rows], worst: Callable[..., float]) -> None:
    """Draw a small dot per head and a large dot for the layer's worst, with a line from side to side."""
    shifts = (-0.13, 0.13)
    extremes: list[list[float]] = []
    for (name, layers), shift in zip(sides.items(), shifts, strict=True):
        size = 46 if len(layers) <= 32 else 14
        rows = [_drawable(layer) for layer in layers]
        heads = [(value, i + shift) for i, row in enumerate(rows) for value in row]
        axes.scatter(*zip(*heads, strict=True), s=size / 4, color=COLOURS[name], alpha=0.4, linewidths=0)
        extremes.append([_worst(row, worst) for row in rows])
        places = [i + shift for i in range(len(rows))]
        axes.scatter(extremes[-1], places, s=size, color=COLOURS[name], label=name, linewidths=0, zorder=3)
    for i, ends in enumerate(zip(*extremes, strict=True)):
        axes.plot(ends, [i + shift for shift in shifts], color=GRID, linewidth=0.8, zorder=1)


def draw_inspection(inspection: Inspection, path: str | Path) -> None:
    """Draw the largest |logit| and the entropy of every head, as maps of layers × heads."""
    layers = list(inspection.layers.values())
    logits, entropies = [_drawable(layer.max_logit) for layer in layers], [_drawable(layer.entropy) for layer in layers]
    ticks = {i: str(i) for i in _ticks(len(layers[0].entropy), 16)}
    title = textwrap.fill(inspection.title.replace(inspection.model, Path(inspection.model).name, 1), 88)
    save_figure(_draw_maps(title, logits, entropies, inspection.cap, layers, "head", ticks), path)


def draw_log(samples: Sequence[LogitSample], path: str | Path) -> None:
    """Draw the samples from `read_log`: the largest |logit| and the least entropy of each layer, by step."""
    names = dict.fromkeys(name for sample in samples for name in sample.layers)
    layers = [layer for sample in samples for layer in sample.layers.values()]
    starts = _ticks(len(samples), COLUMNS)
    columns = [samples[i : i + starts.step] for i in starts]
    cells = [[[s.layers[name] for s in column if name in s.layers] for column in columns] for name in names]
    logits = [[_worst(chain(*(x.max_logit for x in cell)), max) for cell in row] for row in cells]
    entropies = [[_worst(chain(*(x.entropy for x in cell)), min) for cell in row] for row in cells]
    title = f"Attention in training: {len(samples)} samples of steps {samples[0].step} to {samples[-1].step}"
    ticks = {i: str(columns[i][-1].step) for i in _ticks(len(columns), 10)}
    save_figure(_draw_maps(title, logits, entropies, layers[-1].cap, layers, "step", ticks), path)


def _draw_maps(
    title: str, logits: Rows, entropies: Rows, cap: float, layers: Iterable[Any], xlabel: str, ticks: dict[int, str]
) -> Figure:
    """Draw maps of the largest |logit| and of the least entropy in each cell, a row for each layer.

    Dark cells are at risk: logits are coloured by doublings from 1/16 of the cap to twice the cap, and entropies from 0
    to that of even attention in `layers`, so that two drawings can be compared.
    """
    rows, columns = len(logits), len(logits[0])
    figure = new_figure(min(max(7.0 + 0.1 * columns, 8.0), 12.0), min(max(2.2 + 0.3 * rows, 3.8), 12.0))
    figure.suptitle(title, fontsize=11, color=INK)
    axes = figure.subplots(1, 2, sharey=True)
    norm = LogNorm(cap / 16, 2 * cap, clip=True)
    bar = _draw_cells(figure, axes[0], logits, norm, "YlOrRd", "largest |logit|, before any cap")
    doublings = [cap * 2.0**i for i in range(-4, 2)]
    bar.set_ticks(doublings, labels=[f"{logit:.3g}" for logit in doublings])
    bar.minorticks_off()
    scale = Normalize(0, max(0.1, *(layer.even for layer in layers)))
    bar = _draw_cells(figure, axes[1], entropies, scale, "YlGnBu_r", "attention entropy (nats)")
    bar.locator = MaxNLocator(nbins=5)
    axes[0].set_ylabel("layer", color=INK)
    for each in axes:
        each.set_xlabel(xlabel, color=INK)
        each.set_xticks(list(ticks), labels=list(ticks.values()))
    return figure


def draw_demo(conversion: Mapping[str, Any], runs: Sequence[Any], path: str | Path) -> None:
    """Draw the rise in loss of the demo's conversion, and losses and logits of its runs so far."""
    figure = new_figure(12, 4)
    left, *panels = figure.subplots(1, 3, width_ratios=(0.7, 1, 1))
    base = conversion["unpatched"].loss
    rises = dict(zip(conversion, _drawable(each.loss - base for each in conversion.values()), strict=True))
    del rises["unpatched"]
    left.bar(list(rises), list(rises.values()), width=0.55, color=[COLOURS[name] for name in rises])
    left.bar_label(left.containers[0], [f"{rise:+.3f}" for rise in rises.values()], padding=3, fontsize=9, color=INK)
    left.axhline(0, color=COLOURS["unpatched"], linewidth=1.5)
    left.margins(x=0.2, y=0.15)
    finish_axes(left, f"(loss of the unpatched model: {base:.3f})", "rise in held-out loss (nats per token)")
    for axes, title in zip((left, *panels), DEMO, strict=True):
        axes.set_title(title, fontsize=10, color=INK)
    _draw_runs(panels[0], runs, "loss", "held-out loss (nats per token)")
    _draw_runs(panels[1], runs, "max_logit", "largest |logit|, before any cap (log scale)")
    panels[1].set_yscale("log")
    panels[1].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[1].yaxis.set_major_formatter("{x:g}")
    panels[1].yaxis.set_minor_formatter(NullFormatter())
    if runs:
        _legend_outside(figure, panels[0], "lower")
    save_figure(figure, path)


def _draw_runs(axes: Any, runs: Sequence[Any], field: str, label: str) -> None:
    """Draw a line per run, solid at the highest rate and dotted below it; its last value stands beside it."""
    highest = max((run.rate for run in runs), default=0.0)
    for run in runs:
        fast, colour, marker = run.rate == highest, COLOURS[run.model], "s" if run.model == "unpatched" else "o"
        numbers = _drawable(getattr(each, field) for each in run.measured.values())
        style = {"linestyle": "-" if fast else ":", "color": colour, "label": f"{run.model}, rate {run.rate:g}"}
        axes.plot(list(run.measured), numbers, marker=marker, markersize=4 if fast else 2.5, **style)
        if fast:
            last = format_fixed(numbers[-1], 3 if field == "loss" else 0)
            place: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(last, (run.steps, numbers[-1]), fontsize=9, color=colour, **place)
    axes.margins(x=0.12 if runs else 0.05, y=0.1)
    finish_axes(axes, "steps of continued training", label)
    if not runs:
        axes.text(0.5, 0.5, "not trained yet", ha="center", transform=axes.transAxes, color=GRID)


def _draw_cells(figure: Figure, axes: Any, values: Rows, scale: Normalize, colours: str, label: str) -> Any:
    """Draw a row of cells per layer; returns the colour bar above them."""
    image = axes.imshow(values, norm=scale, cmap=colours, aspect="auto", interpolation="nearest")
    axes.tick_params(length=2, colors=INK, labelsize=8)
    axes.spines[:].set_visible(False)
    axes.set_yticks(_ticks(len(values)))
    bar = figure.colorbar(image, ax=axes, location="top", shrink=0.85, aspect=34, pad=0.02)
    bar.set_label(label, fontsize=9, color=INK)
    bar.ax.tick_params(length=2, labelsize=8, colors=INK)
    bar.outline.set_visible(False)
    return bar


def _ticks(count: int, most: int = 24) -> range:
    """At most `most` evenly spaced indices of `count` items."""
    return range(0, count, -(-count // most))


def _drawable(values: Iterable[float]) -> list[float]:
    """The numbers within ±`LARGEST`; NaN, which leaves a gap, for the others."""
    return [min(max(value, -LARGEST), LARGEST) if math.isfinite(value) else math.nan for value in values]


def _worst(values: Iterable[float], worst: Callable[..., float]) -> float:
    """The largest or smallest number that can be drawn; NaN without any."""
    return worst((value for value in _drawable(values) if not math.isnan(value)), default=math.nan)
