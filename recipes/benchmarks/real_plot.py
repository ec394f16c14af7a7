"""The plot of a real model's conversions: what a bound on the logits costs."""

from __future__ import annotations

from pathlib import Path

from run_log import Row

from hf_qknorm.plots import INK, finish_axes, legend_above, new_figure, save_figure, write_beside

LOOKS = (("#12476b", "o"), ("#2a7f9e", "s"), ("#c8553d", "v"), ("#d9a441", "^"), ("#8d5a97", "D"))
LEAST = 1e-5  # nats; the logs have five digits


def plot_kept(conversions: list[Row], logit: float, path: Path) -> None:
    """The KL on each text, and the rise in loss on the held-out one, over the bound; `logit` is the model's own."""
    rows = sorted(conversions, key=lambda row: row["bound"])
    bounds = [row["bound"] for row in rows]
    figure = new_figure(7.5, 4.0)
    axes = figure.subplots()
    for (colour, marker), text in zip(LOOKS, rows[0]["texts"], strict=False):
        values = [max(row["texts"][text]["kl"], LEAST) for row in rows]
        axes.plot(bounds, values, color=colour, marker=marker, markersize=5, label=f"KL, {text}")
    rises = [max(row["texts"]["held-out"]["rise"], LEAST) for row in rows]
    axes.plot(bounds, rises, color=INK, linestyle="--", marker="o", markersize=5, label="rise in loss, held-out")
    for row in rows:
        point = row["bound"], max(text["kl"] for text in row["texts"].values())
        write_beside(axes, f"knee {row['knee']:g}", point, (6, 4), fontsize=8)
    axes.axvline(logit, color="#999999", linewidth=0.8, linestyle=":")
    write_beside(axes, "largest logit of\nthe unpatched model", (logit, LEAST), (4, 4), fontsize=8)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(bounds, [f"{bound:.0f}" for bound in bounds])
    axes.minorticks_off()
    finish_axes(axes, "largest |logit| that any input can have", "nats per token")
    legend_above(axes, columns=3)
    save_figure(figure, path)
