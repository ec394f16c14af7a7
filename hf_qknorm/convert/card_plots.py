"""The two plots of a model card: the loss of a conversion, and the logits and entropies of every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from hf_qknorm.files.formatting import format_fixed
from hf_qknorm.files.names import LOGITS_PLOT, LOSS_PLOT
from hf_qknorm.measure import plotting
from hf_qknorm.measure.predictions import predictions_of
from hf_qknorm.reports.records import LayerStatistics
from hf_qknorm.reports.report import Calibration

COLOUR = plotting.COLOURS | {"this model": plotting.COLOURS["calibrated"]}
SHIFT = {"unpatched": -0.13, "this model": 0.13}  # of a layer's two rows of dots
TALLEST = 11.0  # inches: with more layers, the rows are closer
LINEAR = 8.0  # an axis with doublings is linear up to this logit, because it has no place for 0


def draw_report(report: Calibration, folder: Path) -> list[str]:
    """Write the plots that the report has numbers for into `folder`; returns their names."""
    figures = {LOSS_PLOT: _losses(report), LOGITS_PLOT: _logits(report)}
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    for name, figure in drawn.items():
        plotting.save_figure(figure, folder / name)
    return list(drawn)


def _losses(report: Calibration) -> Figure | None:
    """A line from the unpatched loss to each other loss; None without losses to compare."""
    losses = {name: prediction.loss for name, prediction in predictions_of(report).items()}
    if "unpatched" not in losses:
        return None
    base = losses["unpatched"]
    places = plotting.drawable(losses.values())
    figure = plotting.new_figure(7, 0.9 + 0.45 * len(losses))
    axes = figure.subplots()
    axes.axvline(places[0], color=plotting.GRID, linewidth=1, linestyle=":")
    for row, ((name, loss), place) in enumerate(zip(losses.items(), places, strict=True)):
        line: dict[str, Any] = {"color": COLOUR[name], "linewidth": 3, "solid_capstyle": "round", "alpha": 0.45}
        axes.plot([places[0], place], [row, row], **line)
        axes.plot([place], [row], color=COLOUR[name], marker="o", markersize=8)
        rise = f"  (+{format_fixed(loss - base)})" if loss >= base else "  (lower)"
        plotting.write_beside(axes, format_fixed(loss) + (rise if row else ""), (place, row), (9, 0), va="center")
    axes.set_yticks(range(len(losses)), labels=list(losses))
    axes.set_ylim(len(losses) - 0.5, -0.5)
    axes.set_xmargin(0.08)
    low, high = axes.get_xlim()
    axes.set_xlim(low, high + 0.22 * (high - low))  # room for the last label
    plotting.finish_axes(axes, "loss (nats per token)")
    axes.spines["left"].set_visible(False)
    return figure


def _logits(report: Calibration) -> Figure | None:
    """By layer, every head's largest |logit| and entropy, unpatched, if measured, and converted; or None."""
    layers = list(report.layers.values())
    if not layers:
        return None
    figure = plotting.new_figure(9.5, min(max(1.9 + 0.3 * len(layers), 2.8), TALLEST))
    left, right = figure.subplots(1, 2, sharey=True)
    before = [layer.before for layer in layers if layer.before is not None]
    sides = {"unpatched": before} if before else {}
    sides["this model"] = [layer.after for layer in layers]
    _heads(left, sides, "max_logit", max)
    _heads(right, sides, "entropy", min)
    _bounds(left, [layer.bound for layer in layers])
    if report.scheme.softcap is not None:
        left.axvline(report.cap, color=plotting.GRID, linewidth=1, linestyle="--", label=f"cap {report.cap:g}")
    left.set_ylim(len(layers) - 0.4, -0.6)
    left.set_yticks(plotting.spread_ticks(len(layers)))
    plotting.finish_axes(left, "largest |logit|, before any cap (large dot: worst head)", "layer")
    plotting.finish_axes(right, "attention entropy, nats (large dot: sharpest head)")
    for axes in (left, right):
        axes.set_xlim(left=0)
    figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=4, fontsize=9)
    return figure


def _bounds(axes: Any, bounds: Sequence[float | None]) -> None:
    """Mark the bound on the logits of each layer that has one; the axis then has doublings."""
    drawn = plotting.drawable(math.nan if bound is None else bound for bound in bounds)
    places = {i: bound for i, bound in enumerate(drawn) if bound > 0}  # NaN is not
    if not places:
        return
    axes.set_xscale("symlog", base=2, linthresh=LINEAR, linscale=0.4)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    mark = {"s": 90, "color": plotting.INK, "marker": "|", "linewidths": 2, "zorder": 2}
    axes.scatter(list(places.values()), list(places), label="bound, for any input", **mark)


def _heads(axes: Any, sides: dict[str, list[LayerStatistics]], field: str, worst: Any) -> None:
    """Draw a small dot per head and a large dot for the layer's worst, with a line from unpatched to converted."""
    size = 46 if len(sides["this model"]) <= 32 else 14
    extremes: list[list[float]] = []
    for name, layers in sides.items():
        values = [plotting.drawable(getattr(layer, field)) for layer in layers]
        places = [i + SHIFT[name] for i in range(len(values))]
        heads = [(value, place) for row, place in zip(values, places, strict=True) for value in row]
        axes.scatter(*zip(*heads, strict=True), s=size / 4, color=COLOUR[name], alpha=0.4, linewidths=0)
        extremes.append([worst(plotting.known(row), default=math.nan) for row in values])
        axes.scatter(extremes[-1], places, s=size, color=COLOUR[name], label=name, linewidths=0, zorder=3)
    if len(sides) == 1:
        return
    lines = [value for pair in zip(*extremes, strict=True) for value in (*pair, math.nan)]  # NaN ends a line
    rows = [row for i in range(len(places)) for row in (*(i + shift for shift in SHIFT.values()), math.nan)]
    axes.plot(lines, rows, color=plotting.GRID, linewidth=0.8, zorder=1)
