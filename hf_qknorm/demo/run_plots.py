"""The demo's plot: what the conversion changes, and the runs of continued training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_qknorm.demo.results import Measured, Run
from hf_qknorm.stats import plotting

STEPS = "steps of continued training"


def plot_results(conversion: Mapping[str, Measured], runs: list[Run], path: Path) -> None:
    """Draw the rise in loss of the conversion, and losses and logits of the runs so far, as a PNG."""
    figure = plotting.new_figure(12, 3.9)
    left, *panels = figure.subplots(1, 3, width_ratios=(0.75, 1, 1))
    _draw_conversion(left, conversion)
    fast = max((run.rate for run in runs), default=0.0)
    for run in runs:
        style = {"color": plotting.COLOURS[run.model], "linestyle": "-" if run.rate == fast else ":"}
        style |= {"label": f"{run.model}, rate {run.rate:g}", "marker": "o", "markersize": 3}
        for axes, values in zip(panels, ("loss", "max_logit"), strict=True):
            numbers = plotting.drawable(getattr(each, values) for each in run.measured.values())
            axes.plot(list(run.measured), numbers, **style)
    losses, logits = panels
    plotting.finish_axes(losses, STEPS, "held-out loss (nats per token)")
    plotting.finish_axes(logits, STEPS, "largest |logit| before any cap (log scale)")
    logits.set_yscale("log")
    losses.set_title("Training on: loss", fontsize=10, color=plotting.INK)
    logits.set_title("Training on: attention logits", fontsize=10, color=plotting.INK)
    if runs:
        figure.legend(
            *losses.get_legend_handles_labels(), loc="outside lower right", ncols=4, frameon=False, fontsize=9
        )
    else:
        for axes in panels:
            axes.text(0.5, 0.5, "not trained yet", ha="center", transform=axes.transAxes, color=plotting.GRID)
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
    plotting.finish_axes(axes, "", f"loss above the unpatched model's {base:.3f} (nats per token)")
    axes.set_title("Converting: rise in held-out loss", fontsize=10, color=plotting.INK)
