"""The demo's plot: the rise in loss from the conversion, and the runs of continued training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from hf_qknorm.demo.results import Measured, Run
from hf_qknorm.files.formatting import format_fixed
from hf_qknorm.measure import plotting

STEPS = "steps of continued training"
VALUES = {"loss": ("held-out loss", 3), "max_logit": ("largest |logit|, before any cap", 0)}  # with digits
MARKERS = {"unpatched": "s", "calibrated": "o"}


def plot_results(conversion: Mapping[str, Measured], runs: list[Run], path: Path) -> None:
    """Draw the rise in loss of the conversion, and losses and logits of the runs so far, as a PNG."""
    figure = plotting.new_figure(12, 4)
    left, *panels = figure.subplots(1, 3, width_ratios=(0.7, 1, 1))
    _draw_conversion(left, conversion)
    for axes, (value, (label, digits)) in zip(panels, VALUES.items(), strict=True):
        _draw_runs(axes, runs, value, digits)
        plotting.finish_axes(axes, STEPS, f"{label} (nats per token)" if value == "loss" else f"{label} (log scale)")
        axes.set_title(f"Trained on: {label.partition(',')[0]}", fontsize=10, color=plotting.INK)
    logits = panels[1]
    logits.set_yscale("log")
    logits.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    logits.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    logits.yaxis.set_minor_formatter(NullFormatter())
    if runs:
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    plotting.save_figure(figure, path)


def _draw_conversion(axes: Any, conversion: Mapping[str, Measured]) -> None:
    """Draw bars of the loss above the unpatched model's, which is the baseline."""
    base = conversion["unpatched"].loss
    names = [name for name in conversion if name != "unpatched"]
    rises = plotting.drawable(conversion[name].loss - base for name in names)
    axes.bar(names, rises, width=0.55, color=[plotting.COLOURS[name] for name in names])
    for place, rise in enumerate(rises):
        plotting.write_beside(axes, f"{rise:+.3f}", (place, max(rise, 0.0)), (0, 3), ha="center")
    axes.axhline(0, color=plotting.COLOURS["unpatched"], linewidth=1.5)
    axes.margins(x=0.2, y=0.15)
    plotting.finish_axes(axes, f"(loss of the unpatched model: {base:.3f})", "rise in held-out loss (nats per token)")
    axes.set_title("Converted: rise in loss", fontsize=10, color=plotting.INK)


def _draw_runs(axes: Any, runs: list[Run], value: str, digits: int) -> None:
    """Draw a line per run, solid at the highest rate and dotted below it; its last value stands beside it."""
    highest = max((run.rate for run in runs), default=0.0)
    for run in runs:
        fast, colour = run.rate == highest, plotting.COLOURS[run.model]
        numbers = plotting.drawable(getattr(each, value) for each in run.measured.values())
        style = {"linestyle": "-" if fast else ":", "color": colour, "label": f"{run.model}, rate {run.rate:g}"}
        axes.plot(list(run.measured), numbers, marker=MARKERS[run.model], markersize=4 if fast else 2.5, **style)
        if fast:
            last = format_fixed(numbers[-1], digits)
            plotting.write_beside(axes, last, (run.steps, numbers[-1]), (6, 0), va="center", color=colour)
    axes.margins(x=0.12 if runs else 0.05, y=0.1)
    if not runs:
        axes.text(0.5, 0.5, "not trained yet", ha="center", transform=axes.transAxes, color=plotting.GRID)
