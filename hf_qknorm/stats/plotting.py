"""One style for all plots: colours, scales, and maps of layers × heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

LETTERED = 24  # layers or heads up to which a number in each cell can be read
HOT, COLD = "YlOrRd", "YlGnBu_r"
INK, GRID, OUTLINE = "#333333", "#888888", "#ff6b4a"
COLOURS = {"unpatched": "#4d4d4d", "fresh gains": "#c8553d", "calibrated": "#2a7f9e"}  # for every kind of colour vision

Rows = Sequence[Sequence[float]]


def logit_scale(cap: float) -> Normalize:
    """Colours from 1/16 of the cap to twice of it."""
    return LogNorm(cap / 16, 2 * cap, clip=True)


def by_doublings(bar: Any, cap: float) -> None:
    """Ticks for the colour bar of `logit_scale`."""
    bar.set_ticks([cap * 2.0**i for i in range(-4, 2)], labels=[f"{cap * 2.0**i:.3g}" for i in range(-4, 2)])
    bar.minorticks_off()


def cells(figure: Figure, axes: Any, values: Rows, scale: Normalize, colours: str, label: str) -> Any:
    """A row of cells a layer, with their numbers where there is room; returns the colour bar above them."""
    image = axes.imshow(values, norm=scale, cmap=colours, aspect="auto", interpolation="nearest")
    axes.tick_params(length=2, colors=INK, labelsize=8)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, location="top", shrink=0.85, aspect=34, pad=0.02)
    bar.set_label(label, fontsize=9, color=INK)
    bar.ax.tick_params(length=2, labelsize=8, colors=INK)
    bar.outline.set_visible(False)
    if max(len(values), len(values[0])) <= LETTERED:
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                if not math.isfinite(value):
                    continue
                red, green, blue, _ = colormaps[colours](scale(value))
                ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.55 else INK
                text = f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
                axes.text(j, i, text, ha="center", va="center", fontsize=8 if len(row) <= 16 else 6, color=ink)
    return bar
