"""The two plots of a model card: what a conversion cost, and what it did to the logits of every layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from hf_qknorm.files.atomic_io import replace_file
from hf_qknorm.files.names import LOGITS_PLOT, LOSS_PLOT
from hf_qknorm.files.untrusted import fixed
from hf_qknorm.stats.plotting import COLOURS, GRID, INK
from hf_qknorm.stats.records import LayerStatistics
from hf_qknorm.stats.report import Calibration

COLOUR = {"unpatched": COLOURS["unpatched"], "fresh gains": COLOURS["fresh gains"], "this model": COLOURS["calibrated"]}
SHIFT = {"unpatched": -0.13, "this model": 0.13}  # of a layer's two rows of dots
TALLEST = 11.0  # inches: with more layers, they come closer
LINEAR = 8.0  # logits up to this on an axis by doublings, which has no place for 0
LARGEST = 1e12  # beyond, a number is drawn there: axes have no room for the largest floats


def draw_report(report: Calibration, folder: Path) -> list[str]:
    """Write the plots that the report has numbers for into `folder`, each whole or not at all; returns their names."""
    drawn = []
    for name, figure in ((LOSS_PLOT, _losses(report)), (LOGITS_PLOT, _logits(report))):
        if figure is not None:
            replace_file(folder / name, partial(figure.savefig, dpi=150, format="png"))
            drawn.append(name)
    return drawn


def _losses(report: Calibration) -> Figure | None:
    """A line each for unpatched, fresh gains and calibrated, out to its loss; None without losses."""
    if report.base is None or report.ones is None or report.chosen is None:
        return None
    losses = {"unpatched": report.base.loss}
    if report.scheme.norms:
        losses["fresh gains"] = report.ones.loss
    losses["this model"] = report.chosen.loss
    start = _drawable(report.base.loss)
    figure = Figure(figsize=(7, 0.9 + 0.45 * len(losses)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(start, color=GRID, linewidth=1, linestyle=":")
    for row, (name, loss) in enumerate(losses.items()):
        colour, place = COLOUR[name], _drawable(loss)
        axes.plot([start, place], [row, row], color=colour, linewidth=3, solid_capstyle="round", alpha=0.45)
        axes.plot([place], [row], color=colour, marker="o", markersize=8)
        rise = "" if row == 0 else f"  (+{fixed(loss - report.base.loss)})" if loss >= report.base.loss else "  (lower)"
        axes.annotate(
            f"{fixed(loss)}{rise}",
            (place, row),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    axes.set_yticks(range(len(losses)), labels=list(losses))
    axes.set_ylim(len(losses) - 0.5, -0.5)
    axes.margins(x=0.05)
    axes.set_xmargin(0.08)
    low, high = axes.get_xlim()
    axes.set_xlim(low, high + 0.22 * (high - low))  # room for the last label
    axes.set_xlabel("loss (nats a token)", color=INK)
    _finish(axes)
    axes.spines["left"].set_visible(False)
    return figure


def _logits(report: Calibration) -> Figure | None:
    """By layer, every head's largest |logit| and entropy, unpatched and converted; None without layers."""
    if not report.layers:
        return None
    count = len(report.layers)
    figure = Figure(figsize=(9.5, min(max(1.9 + 0.3 * count, 2.8), TALLEST)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    sides = {
        "unpatched": [layer.before for layer in report.layers.values()],
        "this model": [layer.after for layer in report.layers.values()],
    }
    _heads(left, sides, "max_logit", max)
    _heads(right, sides, "entropy", min)
    _bounds(left, [layer.bound for layer in report.layers.values()])
    if report.scheme.softcap is not None:
        left.axvline(report.cap, color=GRID, linewidth=1, linestyle="--", label=f"cap {report.cap:g}")
    left.set_xlim(left=0)
    right.set_xlim(left=0)
    left.set_xlabel("largest |logit|, before any cap (large dot: worst head)", color=INK)
    right.set_xlabel("attention entropy, nats (large dot: sharpest head)", color=INK)
    left.set_ylabel("layer", color=INK)
    left.set_ylim(count - 0.4, -0.6)
    left.set_yticks(range(0, count, -(-count // 24)))
    for axes in (left, right):
        _finish(axes)
    figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=4, fontsize=9)
    return figure


def _bounds(axes: Any, bounds: Sequence[float | None]) -> None:
    """A bar in each layer at the bound on its logits, where there is one; the axis then goes by doublings."""
    drawn = {place: _drawable(bound) for place, bound in enumerate(bounds) if bound is not None}
    drawn = {place: bound for place, bound in drawn.items() if bound > 0}
    if not drawn:
        return
    axes.set_xscale("symlog", base=2, linthresh=LINEAR, linscale=0.4)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.scatter(
        list(drawn.values()),
        list(drawn),
        s=90,
        color=INK,
        marker="|",
        linewidths=2,
        label="bound, for any input",
        zorder=2,
    )


def _heads(axes: Any, sides: dict[str, list[LayerStatistics]], field: str, worst: Any) -> None:
    """A small dot for each head, a large one for the layer's worst, joined from before to after."""
    size = 46 if len(sides["unpatched"]) <= 32 else 14
    extremes: list[list[float]] = []
    for name, layers in sides.items():
        values = [[_drawable(value) for value in getattr(layer, field)] for layer in layers]
        places = [i + SHIFT[name] for i in range(len(values))]
        heads = [(value, place) for row, place in zip(values, places, strict=True) for value in row]
        axes.scatter(*zip(*heads, strict=True), s=size / 4, color=COLOUR[name], alpha=0.4, linewidths=0)
        extremes.append([worst(_known(row), default=math.nan) for row in values])
        axes.scatter(extremes[-1], places, s=size, color=COLOUR[name], label=name, linewidths=0, zorder=3)
    joined = [value for pair in zip(*extremes, strict=True) for value in (*pair, math.nan)]  # NaN lifts the pen
    rows = [row for i in range(len(places)) for row in (*(i + shift for shift in SHIFT.values()), math.nan)]
    axes.plot(joined, rows, color=GRID, linewidth=0.8, zorder=1)


def _known(values: Sequence[float]) -> Iterable[float]:
    return [value for value in values if not math.isnan(value)]


def _drawable(value: float) -> float:
    """The number where it can be drawn; NaN leaves a gap."""
    return min(max(value, -LARGEST), LARGEST) if math.isfinite(value) else math.nan


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.tick_params(length=2, colors=INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
