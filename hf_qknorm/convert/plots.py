"""The pictures of an inspection: a heat map of layers × heads, and what each knee costs against what it bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.collections import PatchCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from hf_qknorm.convert.advice import scheme_name
from hf_qknorm.convert.inspection import Inspection
from hf_qknorm.convert.measurements import KneeTrials
from hf_qknorm.files.atomic_io import replace_file
from hf_qknorm.stats.plotting import (
    COLD,
    COLOURS,
    GRID,
    HOT,
    INK,
    LETTERED,
    OUTLINE,
    Rows,
    by_doublings,
    cells,
    logit_scale,
)


def heat_map(inspection: Inspection, path: str | Path) -> None:
    """Draw the largest |logit| and the entropy of every head, and each layer's worst head, as a PNG at `path`.

    Dark is at risk in both maps. Colours go by the cap (from 1/16 to twice of it, by doublings) and by the entropy of
    even attention, whatever the model: two drawings can be compared. The file is written whole or not at all.
    """
    logits = [layer.max_logit for layer in inspection.layers.values()]
    entropies = [layer.entropy for layer in inspection.layers.values()]
    layers, heads, cap = len(logits), len(logits[0]), inspection.cap
    height = min(max(2.2 + 0.32 * layers, 3.4), 11.0)
    figure = Figure(figsize=(min(max(8.5 + 0.12 * heads, 9.5), 15.0), height), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1, 0.42))
    scale = logit_scale(cap)
    bar = cells(figure, left, logits, scale, HOT, "largest |logit|, before any cap")
    by_doublings(bar, cap)
    collapsed = [(i, head) for i, risk in _numbered(inspection) for head in risk.collapsed]
    note = "; outlined: low, with large logits" if collapsed else ""
    even = max(max(inspection.even.values()), 0.1)
    bar = cells(figure, middle, entropies, Normalize(0, even), COLD, f"attention entropy (nats){note}")
    bar.locator = MaxNLocator(nbins=5)
    _outline(middle, collapsed, width=1.8 if layers <= LETTERED else 0.7)
    _profile(right, logits, cap, scale)
    _bounds(right, [inspection.bounds.get(name) for name in inspection.layers])
    for axes in (left, middle):
        axes.set_xlabel("head", color=INK)
        axes.set_xticks(range(0, heads, -(-heads // 16)))
    left.set_ylabel("layer", color=INK)
    left.set_yticks(range(0, layers, -(-layers // 24)))
    figure.suptitle(_title(inspection), fontsize=11, color=INK)
    replace_file(Path(path), lambda temporary: figure.savefig(temporary, dpi=150, format="png"))


def knee_curve(inspection: Inspection, path: str | Path) -> None:
    """Draw the rise in loss against the bound on the logits, a point a knee, as a PNG at `path`, whole or not at all.

    The lines are the rise that `calibrate` allows and the largest |logit| that was seen unpatched; the knee that it
    chooses is filled. Raises ValueError for an inspection without knees.
    """
    knees = inspection.knees
    if knees is None:
        raise ValueError(f"the inspection of {inspection.model} has no knees: it takes an unpatched causal model")
    known = [(trial, trial.bound) for trial in knees.trials if trial.bound is not None]
    drawn = [(trial, bound) for trial, bound in known if math.isfinite(bound) and math.isfinite(trial.rise)]
    bounds = [bound for _, bound in drawn]
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=knees.limit, linscale=0.8)
    axes.axhline(knees.limit, color=OUTLINE, linewidth=1, linestyle="--", zorder=1)
    axes.axvline(inspection.largest, color=GRID, linewidth=1, linestyle=":", zorder=1)
    axes.plot(bounds, [trial.rise for trial, _ in drawn], color=COLOURS["calibrated"], linewidth=1.5, zorder=2)
    for trial, bound in drawn:
        chosen = trial is knees.chosen
        axes.plot(
            bound,
            trial.rise,
            marker="o",
            markersize=11 if chosen else 7,
            color=COLOURS["calibrated"],
            markerfacecolor=COLOURS["calibrated"] if chosen else "white",
            zorder=3,
        )
        axes.annotate(
            f"knee {trial.knee:g}" + (", chosen" if chosen else ""),
            (bound, trial.rise),
            xytext=(9, 7),
            textcoords="offset points",
            fontsize=9,
            color=INK,
            fontweight="bold" if chosen else "normal",
        )
    _finish_knees(axes, inspection, knees, bounds)
    figure.suptitle(
        f"{Path(inspection.model).name}: what each knee costs and bounds ({scheme_name(knees.scheme)})",
        fontsize=11,
        color=INK,
    )
    replace_file(Path(path), lambda temporary: figure.savefig(temporary, dpi=150, format="png"))


def _finish_knees(axes: Any, inspection: Inspection, knees: KneeTrials, bounds: Sequence[float]) -> None:
    """Axes, ticks by doublings, and the labels of the two lines."""
    ends = [*bounds, max(inspection.largest, 1e-6)]
    low, high = min(ends) / 1.35, max(ends) * 1.9  # room for the last label
    axes.set_xlim(low, high)
    ticks = [2.0**i for i in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    ticks = ticks[:: -(-len(ticks) // 10)]
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    rises = [trial.rise for trial in knees.trials if math.isfinite(trial.rise)]
    top = 2.2 * max(*rises, knees.limit) if rises else 1.0
    axes.set_ylim(min([*rises, 0.0]) - 0.25 * knees.limit, top)
    marks = [0.0, *(t for i in range(-4, 3) for t in (10.0**i, 3 * 10.0**i) if knees.limit < t < top)]
    axes.set_yticks([*marks, knees.limit], labels=[*(f"{mark:g}" for mark in marks), f"{knees.limit:.2g}"])
    axes.minorticks_off()
    axes.text(high, knees.limit, "rise that calibrate() allows ", ha="right", va="bottom", fontsize=8, color=OUTLINE)
    axes.annotate(
        f"largest |logit| seen unpatched: {inspection.largest:.0f}",
        (inspection.largest, 0),
        xycoords=("data", "axes fraction"),
        xytext=(-3, 6),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="bottom",
        fontsize=8,
        color=INK,
    )
    axes.set_xlabel("bound on |logit| that no input can exceed, worst layer, before any cap", color=INK)
    axes.set_ylabel("rise in loss over the unpatched model (nats)", color=INK)
    axes.grid(alpha=0.25)
    axes.tick_params(length=2, colors=INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _title(inspection: Inspection) -> str:
    state = "" if inspection.scheme is None else f" ({inspection.scheme})"
    advice = "nothing need be added" if inspection.keeps else f"advice: {inspection.advice.name}"
    return f"{Path(inspection.model).name}{state}: attention over {inspection.tokens:,} tokens; {advice}"


def _numbered(inspection: Inspection) -> list[tuple[int, Any]]:
    """The risks with the numbers of their layers."""
    numbers = {name: i for i, name in enumerate(inspection.layers)}
    return [(numbers[risk.layer], risk) for risk in inspection.risks]


def _outline(axes: Any, cells: Sequence[tuple[int, int]], width: float) -> None:
    boxes = [Rectangle((head - 0.46, layer - 0.46), 0.92, 0.92) for layer, head in cells]
    axes.add_collection(PatchCollection(boxes, facecolor="none", edgecolor=OUTLINE, linewidth=width))


def _profile(axes: Any, logits: Rows, cap: float, scale: Normalize) -> None:
    """Each layer's worst head and its median, against the cap and half of it."""
    worst, middle = [max(row) for row in logits], [sorted(row)[len(row) // 2] for row in logits]
    axes.barh(range(len(logits)), worst, height=0.75, color=colormaps[HOT](scale(worst)))
    axes.plot(middle, range(len(logits)), color=INK, linestyle="", marker="|", markersize=5, markeredgewidth=1.4)
    end = max(1.1 * max(worst), 1.1 * cap)
    for limit, style in ((cap / 2, ":"), (cap, "--")):
        axes.axvline(limit, color=GRID, linewidth=1, linestyle=style)
    kept: list[float] = []
    for tick in (cap, 0.0, *(cap * 2.0**i for i in range(-3, 12))):
        if tick < end and all(abs(tick - other) > end / 6 for other in kept):  # closer, labels would touch
            kept.append(tick)
    axes.set_xticks(kept, labels=[f"{tick:.4g}" for tick in kept])
    axes.set_xlim(0, end)
    axes.set_xlabel("worst head (| median)", color=INK)
    axes.tick_params(length=2, colors=INK, labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _bounds(axes: Any, bounds: Sequence[float | None]) -> None:
    """The bound of each layer that has one, as a number at the end of its row."""
    if len(bounds) > LETTERED or not any(bounds):
        return
    for i, bound in enumerate(bounds):
        if bound is not None:
            axes.text(
                1.02, i, f"≤ {bound:.0f}", transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=INK
            )
    axes.set_xlabel("worst head (| median), ≤ bound", color=INK)
