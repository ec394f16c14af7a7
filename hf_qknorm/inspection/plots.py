"""The plots of an inspection: a map of layers × heads, and the loss of each knee over its bound on the logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle

from hf_qknorm.inspection.report import Inspection, KneeTrials, scheme_name
from hf_qknorm.measure import plotting


def heat_map(inspection: Inspection, path: str | Path) -> None:
    """Draw the largest |logit| and the entropy of every head, and each layer's worst head, as a PNG at `path`.

    Dark cells are at risk. The colours depend on the cap (1/16 of it to twice it, by doublings) and on the entropy of
    uniform attention, not on the model: two drawings can be compared.
    """
    logits = [layer.max_logit for layer in inspection.layers.values()]
    entropies = [layer.entropy for layer in inspection.layers.values()]
    layers, heads, cap = len(logits), len(logits[0]), inspection.cap
    width, height = min(max(8.5 + 0.12 * heads, 9.5), 15.0), min(max(2.2 + 0.32 * layers, 3.4), 11.0)
    state = "" if inspection.scheme is None else f" ({inspection.scheme})"
    advice = "nothing need be added" if inspection.keeps else f"advice: {inspection.advice.name}"
    title = f"{Path(inspection.model).name}{state}: attention over {inspection.tokens:,} tokens; {advice}"
    figure = plotting.new_figure(width, height, title)
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1, 0.42))
    plotting.draw_logits(figure, left, logits, cap, "largest |logit|, before any cap")
    numbers = {name: i for i, name in enumerate(inspection.layers)}
    collapsed = [(numbers[risk.layer], head) for risk in inspection.risks for head in risk.collapsed]
    note = "; outlined: low, with large logits" if collapsed else ""
    uniform = max(0.1, *(layer.even for layer in inspection.layers.values()))
    plotting.draw_entropies(figure, middle, entropies, uniform, f"attention entropy (nats){note}")
    boxes = [Rectangle((head - 0.46, layer - 0.46), 0.92, 0.92) for layer, head in collapsed]
    line = 1.8 if layers <= plotting.LETTERED else 0.7
    middle.add_collection(PatchCollection(boxes, facecolor="none", edgecolor=plotting.OUTLINE, linewidth=line))
    _worst_heads(right, logits, cap)
    _bounds(right, [layer.bound for layer in inspection.layers.values()])
    for axes in (left, middle):
        axes.set_xlabel("head", color=plotting.INK)
        axes.set_xticks(plotting.spread_ticks(heads, 16))
    left.set_ylabel("layer", color=plotting.INK)
    plotting.save_figure(figure, path)


def knee_curve(inspection: Inspection, path: str | Path) -> None:
    """Draw the rise in loss over the bound on the logits, a point per knee, as a PNG at `path`.

    Lines mark the rise that `calibrate` allows and the largest |logit| of the unpatched model; the knee that
    `calibrate` chooses is filled. Raises ValueError for an inspection without knees.
    """
    knees = inspection.knees
    if knees is None:
        raise ValueError(f"the inspection of {inspection.model} has no knees: it takes an unpatched causal model")
    bounded = [(trial, trial.bound) for trial in knees.trials if trial.bound is not None]
    points = [(trial, bound) for trial, bound in bounded if math.isfinite(bound) and math.isfinite(trial.rise)]
    bounds = [bound for _, bound in points]
    name, colour = Path(inspection.model).name, plotting.COLOURS["calibrated"]
    figure = plotting.new_figure(8, 4.8, f"{name}: loss and bound on the logits by knee ({scheme_name(knees.scheme)})")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=knees.limit, linscale=0.8)
    axes.axhline(knees.limit, color=plotting.OUTLINE, linewidth=1, linestyle="--", zorder=1)
    axes.axvline(inspection.largest, color=plotting.GRID, linewidth=1, linestyle=":", zorder=1)
    axes.plot(bounds, [trial.rise for trial, _ in points], color=colour, linewidth=1.5, zorder=2)
    for trial, bound in points:
        label, size, fill, weight = f"knee {trial.knee:.3g}", 7, "white", "normal"
        if trial is knees.chosen:
            label, size, fill, weight = f"{label}, chosen", 11, colour, "bold"
        axes.plot(bound, trial.rise, marker="o", markersize=size, color=colour, markerfacecolor=fill, zorder=3)
        plotting.write_beside(axes, label, (bound, trial.rise), (9, 7), fontweight=weight)
    _finish_knees(axes, inspection, knees, bounds)
    plotting.save_figure(figure, path)


def _finish_knees(axes: Any, inspection: Inspection, knees: KneeTrials, bounds: Sequence[float]) -> None:
    """Set the axes' limits, ticks at doublings, and the labels of the two lines."""
    ends = [*bounds, max(inspection.largest, 1e-6)]
    low, high = min(ends) / 1.35, max(ends) * 1.9  # room for the last label
    axes.set_xlim(low, high)
    ticks = [2.0**i for i in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    ticks = [ticks[i] for i in plotting.spread_ticks(len(ticks), 10)]
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    rises = [trial.rise for trial in knees.trials if math.isfinite(trial.rise)]
    top = 2.2 * max(*rises, knees.limit) if rises else 1.0
    axes.set_ylim(min([*rises, 0.0]) - 0.25 * knees.limit, top)
    marks = [0.0, *(t for i in range(-4, 3) for t in (10.0**i, 3 * 10.0**i) if knees.limit < t < top)]
    axes.set_yticks([*marks, knees.limit], labels=[*(f"{mark:g}" for mark in marks), f"{knees.limit:.2g}"])
    axes.minorticks_off()
    small: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": 8}
    label = "rise that calibrate() allows"
    plotting.write_beside(axes, label, (high, knees.limit), (-2, 1), color=plotting.OUTLINE, **small)
    label, small["xycoords"] = f"largest |logit| seen unpatched: {inspection.largest:.0f}", ("data", "axes fraction")
    plotting.write_beside(axes, label, (inspection.largest, 0), (-3, 6), rotation=90, **small)
    label = "bound on |logit| for any input, worst layer, before any cap"
    plotting.finish_axes(axes, label, "rise in loss over the unpatched model (nats)")


def _worst_heads(axes: Any, logits: plotting.Rows, cap: float) -> None:
    """Draw each layer's worst head and its median head, with lines at the cap and half of it."""
    worst, median = [max(row) for row in logits], [sorted(row)[len(row) // 2] for row in logits]
    axes.barh(range(len(logits)), worst, height=0.75, color=colormaps[plotting.HOT](plotting.logit_scale(cap)(worst)))
    axes.plot(median, range(len(logits)), "|", color=plotting.INK, markersize=5, markeredgewidth=1.4)
    end = max(1.1 * max(worst), 1.1 * cap)
    for limit, style in ((cap / 2, ":"), (cap, "--")):
        axes.axvline(limit, color=plotting.GRID, linewidth=1, linestyle=style)
    ticks: list[float] = []
    for tick in (cap, 0.0, *(cap * 2.0**i for i in range(-3, 12))):
        if tick < end and all(abs(tick - other) > end / 6 for other in ticks):  # closer labels would overlap
            ticks.append(tick)
    plotting.finish_axes(axes, "worst head (| median)", size=8)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_xticks(ticks, labels=[f"{tick:.4g}" for tick in ticks])
    axes.set_xlim(0, end)


def _bounds(axes: Any, bounds: Sequence[float | None]) -> None:
    """Write the bound of each layer that has one at the end of its row."""
    if len(bounds) > plotting.LETTERED or not any(bounds):
        return
    style = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8, "color": plotting.INK}
    for i, bound in enumerate(bounds):
        if bound is not None:
            axes.text(1.02, i, f"≤ {bound:.0f}", **style)
    axes.set_xlabel("worst head (| median), ≤ bound", color=plotting.INK, fontsize=9)
