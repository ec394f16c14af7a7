"""The style of all plots: figures, colours, scales, axes, maps of layers × heads, and writing a PNG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hf_qknorm.files.atomic_io import replace_file

LARGEST = 1e12  # larger numbers are drawn here: axes overflow near the largest floats
LETTERED = 24  # layers or heads up to which a number in each cell is legible
HOT, COLD = "YlOrRd", "YlGnBu_r"
INK, GRID, OUTLINE = "#333333", "#888888", "#ff6b4a"
COLOURS = {"unpatched": "#4d4d4d", "fresh gains": "#c8553d", "calibrated": "#2a7f9e"}  # safe for colour blindness

Rows = Sequence[Sequence[float]]


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """An empty figure of this size in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11, color=INK)
    return figure


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write the figure as a PNG; a failed run leaves the old file."""
    replace_file(Path(path), partial(figure.savefig, dpi=150, format="png"))


def finish_axes(axes: Any, xlabel: str, ylabel: str = "", size: float = 9) -> None:
    """Set the labels, a light grid and small ticks; remove the frame at the top and on the right."""
    axes.set_xlabel(xlabel, color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.grid(alpha=0.25)
    axes.tick_params(length=2, colors=INK, labelsize=size)
    axes.spines[["top", "right"]].set_visible(False)


def legend_above(axes: Any, size: float = 9, columns: int = 4) -> None:
    """Put the legend above the axes."""
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
    axes.legend(frameon=False, fontsize=size, ncols=columns, labelcolor=INK, **place)


def write_beside(axes: Any, text: str, point: tuple[float, float], shift: tuple[float, float], **style: Any) -> None:
    """Write `text` at `point`, moved by `shift` in typographic points."""
    axes.annotate(text, point, xytext=shift, textcoords="offset points", **{"fontsize": 9, "color": INK, **style})


def spread_ticks(count: int, most: int = 24) -> range:
    """At most `most` evenly spaced indices of `count` items."""
    return range(0, count, -(-count // most))


def drawable(values: Iterable[float]) -> list[float]:
    """The numbers within ±`LARGEST`; NaN, which leaves a gap, for the others."""
    return [min(max(value, -LARGEST), LARGEST) if math.isfinite(value) else math.nan for value in values]


def known(values: Iterable[float]) -> list[float]:
    """The numbers that are not NaN."""
    return [value for value in values if not math.isnan(value)]


def logit_scale(cap: float) -> Normalize:
    """Colours from 1/16 of the cap to twice the cap."""
    return LogNorm(cap / 16, 2 * cap, clip=True)


def draw_logits(figure: Figure, axes: Any, logits: Rows, cap: float, label: str) -> None:
    """Draw the largest |logit| by `logit_scale`; the colour bar has a tick at each doubling."""
    bar = _draw_cells(figure, axes, logits, logit_scale(cap), HOT, label)
    ticks = [cap * 2.0**i for i in range(-4, 2)]
    bar.set_ticks(ticks, labels=[f"{tick:.3g}" for tick in ticks])
    bar.minorticks_off()


def draw_entropies(figure: Figure, axes: Any, entropies: Rows, uniform: float, label: str) -> None:
    """Draw attention entropies; colours range from 0 to `uniform`, the entropy of uniform attention."""
    bar = _draw_cells(figure, axes, entropies, Normalize(0, uniform), COLD, label)
    bar.locator = MaxNLocator(nbins=5)


def _draw_cells(figure: Figure, axes: Any, values: Rows, scale: Normalize, colours: str, label: str) -> Any:
    """Draw a row of cells per layer, with numbers where they are legible; returns the colour bar above them."""
    image = axes.imshow(values, norm=scale, cmap=colours, aspect="auto", interpolation="nearest")
    axes.tick_params(length=2, colors=INK, labelsize=8)
    axes.spines[:].set_visible(False)
    axes.set_yticks(spread_ticks(len(values)))
    bar = figure.colorbar(image, ax=axes, location="top", shrink=0.85, aspect=34, pad=0.02)
    bar.set_label(label, fontsize=9, color=INK)
    bar.ax.tick_params(length=2, labelsize=8, colors=INK)
    bar.outline.set_visible(False)
    if max(len(values), len(values[0])) <= LETTERED:
        _write_numbers(axes, values, scale, colours)
    return bar


def _write_numbers(axes: Any, values: Rows, scale: Normalize, colours: str) -> None:
    """Write each finite number into its cell, white on dark colours."""
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if not math.isfinite(value):
                continue
            red, green, blue, _ = colormaps[colours](scale(value))
            ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.55 else INK
            text = f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
            axes.text(j, i, text, ha="center", va="center", fontsize=8 if len(row) <= 16 else 6, color=ink)
