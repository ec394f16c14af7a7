"""Plots of the sweeps: loss over learning rate, largest logits over time, loss over the order of the norm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hf_qknorm.files.atomic_io import replace_file

INK = "#333333"
COLOURS = (
    "#4d4d4d",
    "#c8553d",
    "#2a7f9e",
    "#7aa6c2",
    "#3c8d5a",
    "#d9a441",
    "#8d5a97",
)  # safe for colour blindness
MARKERS = "osv^DPX"


def plot_losses(results: Mapping[str, Mapping[float, Sequence[Any]]], limit: float, path: Path) -> None:
    """Plot held-out loss over learning rate: a line per arm (the mean of seeds), a dot per seed; above `limit` is
    diverged.
    """
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for (arm, by_rate), colour, marker in zip(results.items(), COLOURS, MARKERS, strict=False):
        ends = {rate: [run["held_out"] for run in runs] for rate, runs in by_rate.items()}
        means = [statistics.mean(losses) for losses in ends.values()]
        axes.plot(list(ends), means, color=colour, marker=marker, markersize=5, label=arm)
        for rate, losses in ends.items():
            axes.plot([rate] * len(losses), losses, color=colour, linestyle="", marker=".", markersize=4, alpha=0.5)
    axes.axhline(limit, color="#999999", linewidth=0.8, linestyle="--", label="diverged above")
    axes.set_ylim(top=min(axes.get_ylim()[1], limit + 1))  # what went further is diverged all the same
    rates = list(next(iter(results.values())))
    axes.set_xscale("log", base=2)
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set(xlabel="learning rate (Adam)", ylabel="held-out loss (nats a character)")
    _finish(figure, [axes], path)


def plot_logits(results: Mapping[str, Mapping[float, Sequence[Any]]], path: Path) -> None:
    """Plot the largest |logit| before any cap over steps: a column per rate, a line per arm (the median of seeds)."""
    rates = list(next(iter(results.values())))
    columns = min(4, len(rates))
    lines = -(-len(rates) // columns)
    figure = Figure(figsize=(3 * columns, 2.5 * lines + 0.6), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, rate in zip(grid, rates, strict=False):
        for (arm, by_rate), colour in zip(results.items(), COLOURS, strict=False):
            seen: dict[int, list[float]] = {}
            for run in by_rate[rate]:
                for step, logit in run["logits"]:
                    seen.setdefault(step, []).append(logit if math.isfinite(logit) else math.inf)
            axes.plot(list(seen), [statistics.median(x) for x in seen.values()], color=colour, linewidth=1.2, label=arm)
        axes.axhline(50, color="#999999", linewidth=0.8, linestyle="--")
        axes.set_yscale("log")
        axes.set_title(f"rate {rate:g}", fontsize=9, color=INK)
    for axes in grid[len(rates) :]:
        axes.set_visible(False)
    figure.supxlabel("steps", fontsize=9)
    figure.supylabel("largest |logit|, before any cap (dashed: 50)", fontsize=9)
    _finish(figure, grid, path)


def plot_orders(results: Mapping[tuple[float, str], Sequence[Any]], path: Path) -> None:
    """Plot held-out loss over p, relative to p = 2 fold by fold: a line per initial gain, with its standard error."""
    figure = Figure(figsize=(6.2, 3.8), layout="constrained")
    axes = figure.subplots()
    gains = dict.fromkeys(fresh for _, fresh in results)
    for fresh, colour, marker in zip(gains, COLOURS[1:], MARKERS, strict=False):
        orders = [p for p, other in results if other == fresh]
        apart = {p: _apart(results[p, fresh], results[2.0, fresh]) for p in orders}
        means = [statistics.mean(values) for values in apart.values()]
        errors = [statistics.stdev(x) / len(x) ** 0.5 if len(x) > 1 else 0.0 for x in apart.values()]
        label = f"{fresh} fresh gain"
        axes.errorbar(orders, means, errors, color=colour, marker=marker, markersize=5, capsize=3, label=label)
    axes.axhline(0, color="#999999", linewidth=0.8, linestyle="--")
    axes.set(xlabel="order p of the norm", ylabel="held-out loss less that of p = 2 (nats)")
    _finish(figure, [axes], path)


def _apart(runs: Sequence[Any], others: Sequence[Any]) -> list[float]:
    return [run["held_out"] - other["held_out"] for run, other in zip(runs, others, strict=True)]


def _finish(figure: Figure, grid: Sequence[Any], path: Path) -> None:
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside upper center", ncols=4, fontsize=9)
    for axes in grid:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    replace_file(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))
