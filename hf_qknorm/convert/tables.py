"""Reports and inspections as text: aligned tables of predictions and layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hf_qknorm.strangers import fixed

if TYPE_CHECKING:
    from hf_qknorm.convert.report import Calibration, LayerStatistics, Numbers, Prediction

ROWS = 12  # layers in a table: the worst ones; JSON has them all
READING = "max |logit|: worst head, before any cap; entropy: sharpest head, in nats; others: means over heads"
BOUND = "bound: the largest |logit| that any input can give"
BEYOND = "beyond: the share of vectors beyond the knee"


def calibration_table(report: Calibration) -> str:
    """Predictions, and the layers with the largest logits: a few lines of text, up to 120 wide."""
    named = {"unpatched": report.base, "fresh gains": report.ones}
    named[report.title] = report.chosen
    worst = sorted(report.layers.items(), key=lambda item: -max(item[1].after.max_logit))
    beyond = ["beyond q, k"] if report.scheme.knee else []
    rows = [["layer", "max |logit|", "bound", "entropy", over_names(report.cap)[0], "rms q, k", *beyond, "gain q, k"]]
    for name, layer in worst[:ROWS]:
        largest, *others = (" → ".join(pair) for pair in zip(*map(_cells, (layer.before, layer.after)), strict=True))
        rows.append([name, largest, bound_cell(layer.bound), *others])
        rows[-1].append(pair_of_means(layer.before.rms_q, layer.before.rms_k))
        rows[-1] += [pair_of_means(layer.beyond_q, layer.beyond_k, ".2%")] * len(beyond)
        rows[-1].append(pair_of_means(layer.gain_q, layer.gain_k))
    reading = "; ".join([f"Before → after; {BOUND}", *([BEYOND] if beyond else [])])
    parts = (
        f"{report.method} on {report.tokens:,} tokens: {report.scheme}",
        predictions_table({name: found for name, found in named.items() if found is not None}),
        "loss, KL by knee: " + ", ".join(f"{knee:g}: {p.loss:.3f}, {p.kl:.4f}" for knee, p in report.knees.items())
        if report.knees
        else "",
        aligned(rows) + rest(len(worst)),
        f"{reading};\n{READING}.",
    )
    return "\n\n".join(part for part in parts if part)


def predictions_table(predictions: Mapping[str, Prediction]) -> str:
    """A line a prediction; empty without any."""
    rows = [["", "loss", "perplexity", "KL", "same top token"]]
    for name, p in predictions.items():
        rows.append([name, f"{p.loss:.3f}", f"{p.perplexity:.2f}", f"{p.kl:.4f}", f"{p.agreement:.1%}"])
    return aligned(rows) if predictions else ""


def over_names(cap: float) -> list[str]:
    """The names of the columns of shares over half the cap and over all of it: `> 25`, `> 50`."""
    return [f"> {cap / 2:g}", f"> {cap:g}"]


def bound_cell(bound: float | None) -> str:
    """A bound with one decimal; - for none."""
    return "-" if bound is None else fixed(bound, 1)


def pair_of_means(q: Numbers | None, k: Numbers | None, form: str = ".3g") -> str:
    """The means over heads of queries' numbers and of keys': `1.2, 0.8`; - where there are none."""
    cells = ["-" if numbers is None else format(mean(numbers), form) for numbers in (q, k)]
    return "-" if q is None and k is None else ", ".join(cells)


def rest(layers: int) -> str:
    """The line below a table that leaves layers out."""
    return f"\n… and {layers - ROWS} calmer layers" if layers > ROWS else ""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def mean(values: Iterable[float]) -> float:
    """The mean of a few numbers."""
    values = list(values)
    return sum(values) / len(values)


def _cells(layer: LayerStatistics) -> list[str]:
    return [f"{max(layer.max_logit):.1f}", f"{min(layer.entropy):.2f}", f"{mean(layer.over_half):.2%}"]
