"""The demo's two plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display

from matplotlib import pyplot

from hf_qknorm.files.atomic_io import replace_file
from hf_qknorm.stats.plotting import COLOURS
from hf_qknorm.stats.report import Calibration


def plot_losses(runs: dict[str, Any], calibration: Calibration, path: Path) -> None:
    """Held-out loss over the steps of continued training, a line a run; what they start from is written beside it."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, run in runs.items():
        steps, losses = zip(*run["held_out"], strict=True)
        knee = f", knee {calibration.scheme.knee:g}" if name == "calibrated" and calibration.scheme.knee else ""
        axes.plot(steps, losses, color=COLOURS[name], marker="o", markersize=3, label=name + knee)
        below = name == "unpatched"  # the calibrated model starts right above
        axes.annotate(
            f"{losses[0]:.3f}",
            (0, losses[0]),
            xytext=(4, -6 if below else 6),
            va="top" if below else "bottom",
            textcoords="offset points",
            fontsize=9,
            color=COLOURS[name],
        )
    axes.set(xlabel="steps of continued training", ylabel="held-out loss (nats a token)")
    axes.margins(y=0.12)
    figure.suptitle("Converting a trained model: new norms with fresh gains, and as calibrate() puts them", fontsize=11)
    _finish(figure, axes, path)


def plot_logits(runs: dict[str, Any], cap: float | None, path: Path) -> None:
    """The largest attention logit over the steps, and by layer and head before and after."""
    figure, (over_steps, *maps) = pyplot.subplots(
        1, 3, figsize=(12, 3.8), layout="constrained", width_ratios=(1.3, 1, 1)
    )
    for name, run in runs.items():
        steps, logits = zip(*run["max_logit"], strict=True)
        over_steps.plot(steps, logits, color=COLOURS[name], marker="o", markersize=3, label=name)
    if cap is not None:
        over_steps.axhline(cap, color="#999999", linewidth=0.8, linestyle="--", label=f"cap {cap:g}")
    over_steps.set(xlabel="steps of continued training", ylabel="largest |logit|, before the cap")
    over_steps.set_ylim(bottom=0)
    over_steps.margins(y=0.12)
    shown = {name: runs[name]["max_logit_by_head"] for name in ("unpatched", "calibrated")}
    top = max(value for heads in shown.values() for row in heads for value in row)
    for axes, (name, heads) in zip(maps, shown.items(), strict=True):
        image = axes.imshow(heads, vmin=0, vmax=top, cmap="viridis", aspect="auto")
        axes.set(xlabel="head", ylabel="layer", title=f"{name}, after training")
        axes.set_xticks(range(len(heads[0])))
        axes.set_yticks(range(len(heads)))
        for i, row in enumerate(heads):
            for j, value in enumerate(row):
                shade = "white" if value < 0.6 * top else "black"
                axes.text(j, i, f"{value:.0f}", ha="center", va="center", color=shade, fontsize=8)
    figure.colorbar(image, ax=maps, label="largest |logit|")
    _finish(figure, over_steps, path)


def _finish(figure: Any, axes: Any, path: Path) -> None:
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    replace_file(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))
    pyplot.close(figure)
