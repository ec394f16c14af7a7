"""Plots of the sweeps: loss over learning rate, observations over time, loss over the order of the norm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from paired import Difference

from hf_qknorm.measure.plotting import INK, save_figure

COLOURS = (
    "#4d4d4d",
    "#c8553d",
    "#2a7f9e",
    "#7aa6c2",
    "#3c8d5a",
    "#d9a441",
    "#8d5a97",
    "#b58a6a",
    "#e08bb1",
)  # safe for colour blindness, with the markers
MARKERS = "osv^DPX<>"

Results = Mapping[str, Mapping[float, Sequence[Any]]]  # by arm and rate, one per seed


def plot_losses(results: Results, lines: Mapping[str, float], path: Path, each: str = "character") -> None:
    """Plot held-out loss over learning rate: a line per arm (the mean of seeds), a dot per seed, and named `lines`.

    The loss is in nats per `each`.
    """
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    top = max(lines.values()) + 0.5
    for (arm, by_rate), colour, marker in zip(results.items(), COLOURS, MARKERS, strict=False):
        ends = {rate: [run["held_out"] for run in runs] for rate, runs in by_rate.items()}
        means = [statistics.mean(losses) for losses in ends.values()]
        axes.plot(list(ends), means, color=colour, marker=marker, markersize=5, label=arm)
        for rate, losses in ends.items():
            axes.plot([rate] * len(losses), losses, color=colour, linestyle="", marker=".", markersize=4, alpha=0.5)
    _level(axes, lines)
    axes.set_ylim(top=min(axes.get_ylim()[1], top))  # a run that ended above is no better known by how far
    _rate_axis(axes, list(next(iter(results.values()))))
    axes.set_ylabel(f"held-out loss (nats per {each})")
    finish(figure, [axes], path)


def plot_over_steps(results: Results, column: str, label: str, path: Path, line: float | None = None) -> None:
    """Plot an observed column over steps: a panel per rate, a line per arm (the median of seeds)."""
    rates = list(next(iter(results.values())))
    columns = min(4, len(rates))
    rows = -(-len(rates) // columns)
    figure = Figure(figsize=(3 * columns, 2.5 * rows + 0.8), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, rate in zip(grid, rates, strict=False):
        for (arm, by_rate), colour in zip(results.items(), COLOURS, strict=False):
            axes.plot(*_median(by_rate[rate], column), color=colour, linewidth=1.2, label=arm)
        if line is not None:
            axes.axhline(line, color="#999999", linewidth=0.8, linestyle="--")
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.set_title(f"rate {rate:g}", fontsize=9, color=INK)
    for axes in grid[len(rates) :]:
        axes.set_visible(False)
    figure.supxlabel("steps", fontsize=9)
    figure.supylabel(label, fontsize=9)
    finish(figure, grid, path)


def plot_outputs(results: Results, layers: Mapping[str, str], path: Path) -> None:
    """Plot the rms of layers' outputs over steps: a row per arm, a column per layer, a line per rate (of medians)."""
    figure = Figure(figsize=(3 * len(layers), 2.1 * len(results) + 0.8), layout="constrained")
    grid = figure.subplots(len(results), len(layers), sharex=True, sharey="col", squeeze=False)
    for line, (arm, by_rate) in zip(grid, results.items(), strict=True):
        for axes, (column, title) in zip(line, layers.items(), strict=True):
            for place, (rate, runs) in enumerate(by_rate.items()):
                shade = colormaps["viridis"](0.95 * place / max(len(by_rate) - 1, 1))
                axes.plot(*_median(runs, column), color=shade, linewidth=1.2, label=f"{rate:g}")
            axes.set_yscale("log")
            axes.minorticks_off()
            axes.set_title(f"{arm}: {title}", fontsize=9, color=INK)
    figure.supxlabel("steps", fontsize=9)
    figure.supylabel("root mean square of the outputs, by learning rate", fontsize=9)
    finish(figure, grid.flatten(), path)


def _median(runs: Sequence[Any], column: str) -> tuple[list[float], list[float]]:
    """The steps, and the medians of the runs that reached them; what is not finite is above all else."""
    seen: dict[float, list[float]] = {}
    for run in runs:
        for step, value in zip(run["seen"]["step"], run["seen"][column], strict=False):
            seen.setdefault(step, []).append(value if math.isfinite(value) else math.inf)
    return list(seen), [statistics.median(values) for values in seen.values()]


def _level(axes: Any, lines: Mapping[str, float]) -> None:
    for (name, value), style in zip(lines.items(), ("--", ":"), strict=True):
        axes.axhline(value, color="#999999", linewidth=1, linestyle=style, label=name)


def _rate_axis(axes: Any, rates: list[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set_xlabel("learning rate (Adam)")


def plot_orders(results: Mapping[tuple[float, str], Sequence[Any]], path: Path) -> None:
    """Plot held-out loss over p, relative to p = 2 fold by fold: a line per initial gain, with its standard error."""
    figure = Figure(figsize=(6.2, 3.8), layout="constrained")
    axes = figure.subplots()
    gains = dict.fromkeys(fresh for _, fresh in results)
    for fresh, colour, marker in zip(gains, COLOURS[1:], MARKERS, strict=False):
        orders = [p for p, other in results if other == fresh]
        losses = {p: [run["held_out"] for run in results[p, fresh]] for p in orders}
        apart = [Difference.of(ends, losses[2.0]) for ends in losses.values()]
        means, errors, label = [x.mean for x in apart], [x.error for x in apart], f"{fresh} fresh gain"
        axes.errorbar(orders, means, errors, color=colour, marker=marker, markersize=5, capsize=3, label=label)
    axes.axhline(0, color="#999999", linewidth=0.8, linestyle="--")
    axes.set(xlabel="order p of the norm", ylabel="held-out loss less that of p = 2 (nats)")
    finish(figure, [axes], path)


def finish(figure: Figure, panels: Sequence[Any], path: Path, columns: int = 4, size: float = 9) -> None:
    """Add a light grid, and a legend of the first panel's lines above all panels; write the figure as a PNG."""
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside upper center", ncols=columns, fontsize=size)
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
