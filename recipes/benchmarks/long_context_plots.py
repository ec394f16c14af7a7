"""The plot of `long_context.py`: rises by position, and copying by distance."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from long_context_page import BASE, copies, stretch
from paired import Difference
from run_log import Row
from sweep_plots import COLOURS, MARKERS, finish

from hf_qknorm.measure.plotting import INK, finish_axes, new_figure


def plot(sections: dict[str, dict[str, Row]], length: int, path: Path) -> None:
    """Draw a panel of rises by position per model, and one of copying per model that copies."""
    able = [name for name, runs in sections.items() if copies(runs[BASE])]
    rows = -(-(len(sections) + len(able)) // 2)
    figure = new_figure(10.5, 4.4 * rows)
    panels = list(figure.subplots(rows, 2, squeeze=False).flat)
    arms = list(dict.fromkeys(arm for runs in sections.values() for arm in runs))
    looks = {arm: {"color": COLOURS[i % 7], "marker": MARKERS[i % 7], "linestyle": "-" if i < 7 else "--",
                   "markersize": 4, "linewidth": 1.1, "label": arm} for i, arm in enumerate(arms)}  # fmt: skip
    for axes, (name, runs) in zip(panels, sections.items(), strict=False):
        draw_rises(axes, runs, looks, length)
        axes.set_title(name, fontsize=9, color=INK)
    for axes, name in zip(panels[len(sections) :], able, strict=False):
        draw_copying(axes, sections[name], looks, length)
        axes.set_title(f"{name}: copying", fontsize=9, color=INK)
    for axes in panels[len(sections) + len(able) :]:
        axes.remove()
    finish(figure, panels[len(sections) + len(able) - 1 :: -1], path, columns=4, size=8)


def draw_rises(axes: Any, runs: dict[str, Row], looks: dict[str, Any], length: int) -> None:
    """Draw the rise over the unpatched model's loss, with two standard errors, over positions."""
    base = runs[BASE]
    edges = base["edges"]
    middles = [(low + high) / 2 for low, high in zip(edges, edges[1:], strict=False)]
    for arm, run in runs.items():
        rises = [Difference.of(stretch(run, i), stretch(base, i)) for i in range(len(middles))]
        axes.errorbar(middles, [r.mean for r in rises], [2 * r.error for r in rises], capsize=2, **looks[arm])
    axes.axvline(length, color="#999999", linewidth=0.8, linestyle=":")
    finish_axes(axes, "position (dotted: the trained length)", "rise in loss (nats)")


def draw_copying(axes: Any, runs: dict[str, Row], looks: dict[str, Any], length: int) -> None:
    """Draw the share of right characters in the second copy over distances."""
    for arm, run in runs.items():
        found = run["copying"]["random"]
        axes.plot([int(d) for d in found], [statistics.fmean(x["right"]) for x in found.values()], **looks[arm])
    axes.axvline(length, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_ylim(0, 1)
    finish_axes(axes, "distance from a span to its copy", "right in the second copy (share)")
