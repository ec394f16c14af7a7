"""The demo's two plots: held-out losses, and attention logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_qknorm.stats import plotting
from hf_qknorm.stats.logit_statistics import CAP
from hf_qknorm.stats.report import Calibration

STEPS = "steps of continued training"


def plot_losses(runs: dict[str, Any], calibration: Calibration, path: Path) -> None:
    """Draw the held-out loss over the steps of continued training, a line per run, with the first loss as a number."""
    figure = plotting.new_figure(7, 4, "Converting a trained model: norms with fresh gains and with calibrated gains")
    axes = figure.subplots()
    for name, run in runs.items():
        steps, losses = zip(*run["held_out"], strict=True)
        knee = f", knee {calibration.scheme.knee:g}" if name == "calibrated" and calibration.scheme.knee else ""
        colour = plotting.COLOURS[name]
        axes.plot(steps, losses, color=colour, marker="o", markersize=3, label=name + knee)
        shift, side = (-6, "top") if name == "unpatched" else (6, "bottom")  # calibrated starts right above unpatched
        plotting.write_beside(axes, f"{losses[0]:.3f}", (0, losses[0]), (4, shift), va=side, color=colour)
    axes.margins(y=0.12)
    plotting.finish_axes(axes, STEPS, "held-out loss (nats per token)")
    plotting.legend_above(axes)
    plotting.save_figure(figure, path)


def plot_logits(runs: dict[str, Any], cap: float | None, path: Path) -> None:
    """Draw the largest |logit| over the steps, and after training by layer and head of two runs."""
    figure = plotting.new_figure(12, 3.8)
    over_steps, *maps = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
    for name, run in runs.items():
        steps, logits = zip(*run["max_logit"], strict=True)
        over_steps.plot(steps, logits, color=plotting.COLOURS[name], marker="o", markersize=3, label=name)
    if cap is not None:
        over_steps.axhline(cap, color=plotting.GRID, linewidth=0.8, linestyle="--", label=f"cap {cap:g}")
    over_steps.set_ylim(bottom=0)
    over_steps.margins(y=0.12)
    plotting.finish_axes(over_steps, STEPS, "largest |logit|, before the cap")
    plotting.legend_above(over_steps)
    for axes, name in zip(maps, ("unpatched", "calibrated"), strict=True):
        heads = runs[name]["max_logit_by_head"]
        plotting.draw_logits(figure, axes, heads, cap or CAP, f"largest |logit| after training, {name}")
        axes.set_xticks(range(len(heads[0])))
        axes.set_xlabel("head", color=plotting.INK)
        axes.set_ylabel("layer", color=plotting.INK)
    plotting.save_figure(figure, path)
