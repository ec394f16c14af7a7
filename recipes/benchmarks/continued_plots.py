"""Plots of continued training: loss and logits over the rate, and logits and entropy over steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from continued_page import Grid, largest_logit
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullLocator
from run_log import Row

from hf_qknorm.plots import INK, save_figure

STYLES = {
    "unpatched": ("#4d4d4d", "-", "o"),
    "unpatched, clip 0.3": ("#a0a0a0", "--", "o"),
    "soft_cap": ("#c8553d", "-", "s"),
    "qk_norm_cap, ones": ("#7aa6c2", "--", "v"),
    "qk_norm_cap, knee": ("#2a7f9e", "-", "v"),
    "qk_norm_cap, knee lowered": ("#12476b", "-", "^"),
    "qk_norm, knee": ("#5bb0a0", "-", "<"),
    "qk_norm, opened and removed": ("#5bb0a0", "-.", ">"),
    "QK-Clip 30": ("#d9a441", "-", "P"),
    "QK-Clip 100": ("#d9a441", "--", "P"),
    "Muon": ("#8d5a97", "-", "X"),
    "Muon, QK-Clip 100": ("#8d5a97", "--", "X"),
    "Muon, knee": ("#4b2354", "-", "h"),
    "Muon, knee lowered": ("#4b2354", "-.", "*"),
    "QuacK": ("#3c8d5a", "-", "d"),
}  # colours that colour-blind people can tell apart, with a marker each
FRONT = ("unpatched", "soft_cap", "QK-Clip 30", "QuacK", *(arm for arm in STYLES if arm.startswith("qk_norm")))


def plot_rates(arms: Mapping[str, Grid], ngrams: Mapping[str, float], path: Path) -> None:
    """Held-out loss (dots for seeds, a line for their mean), and the largest |logit|, over the learning rate.

    The losses of tables of n-grams are horizontal lines, where they are among those of the arms.
    """
    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for arm, grid in arms.items():
        colour, line, marker = STYLES[arm]
        look = {"color": colour, "linestyle": line, "marker": marker, "markersize": 5}
        left.plot(grid.rates, [grid.mean(rate) for rate in grid.rates], label=arm, **look)
        for rate in grid.rates:
            left.plot([rate] * grid.seeds, grid.losses(rate), color=colour, linestyle="", marker=".", alpha=0.5)
        right.plot(grid.rates, [max(map(largest_logit, runs)) for runs in grid.runs.values()], **look)
    low, high = left.get_ylim()
    for name, loss in ngrams.items():
        if low < loss < high:
            left.axhline(loss, color="#999999", linewidth=0.8, linestyle=":")
            left.text(0.01, loss, name, transform=left.get_yaxis_transform(), fontsize=8, color=INK, va="bottom")
    left.set(ylabel="held-out loss at the end (nats a token)")
    right.set(ylabel="largest |logit| of the run, before any cap")
    scale_logits(right)
    for axes in (left, right):
        axes.set(xscale="log", xlabel="learning rate")
        axes.set_xticks(next(iter(arms.values())).rates, [f"{x:g}" for x in next(iter(arms.values())).rates])
        axes.xaxis.set_minor_locator(NullLocator())
    finish(figure, [left, right], path)


def plot_steps(arms: Mapping[str, Grid], path: Path) -> None:
    """Held-out loss, largest |logit| and smallest entropy share over steps: a column per rate, medians of the seeds."""
    rates = next(iter(arms.values())).rates
    figure = Figure(figsize=(2.7 * len(rates), 7), layout="constrained")
    grid = figure.subplots(3, len(rates), sharex=True, sharey="row", squeeze=False)
    for column, rate in zip(grid.T, rates, strict=True):
        for arm, runs in arms.items():
            colour, line, _ = STYLES[arm]
            for axes, index in zip(column, (1, 2, 3), strict=True):
                steps, values = _medians(runs.runs[rate], index)
                axes.plot(steps, values, color=colour, linestyle=line, linewidth=1.2, label=arm)
        column[0].set_title(f"rate {rate:g}", fontsize=9, color=INK)
        scale_logits(column[1])
        column[2].set_yscale("log")
        column[2].set_xlabel("steps")
    for row, name in zip(grid, ("held-out loss", "largest |logit|", "smallest entropy share"), strict=True):
        row[0].set_ylabel(name)
    finish(figure, list(grid.flatten()), path)


def scale_logits(axes: Any) -> None:
    """Give a panel of logits a logarithmic scale, with plain numbers at the ticks, within a decade too."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter())


def _medians(runs: list[Row], index: int) -> tuple[list[int], list[float]]:
    seen: dict[int, list[float]] = {}
    for run in runs:
        for look in run["way"]:
            seen.setdefault(look[0], []).append(look[index])
    return list(seen), [statistics.median(values) for values in seen.values()]


def finish(figure: Figure, panels: Sequence[Any], path: Path) -> None:
    """Add a light grid, and a legend of the first panel's lines above all panels; write the figure as a PNG."""
    handles, labels = panels[0].get_legend_handles_labels()
    columns = int(figure.get_figwidth() / 2.3)  # of the longest labels
    figure.legend(handles, labels, frameon=False, loc="outside upper center", ncols=columns, fontsize=9)
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
