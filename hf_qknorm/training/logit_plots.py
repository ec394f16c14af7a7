"""The picture of a monitor's log: layers × steps, the largest logits and the entropies, and the worst heads' curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hf_qknorm.files.atomic_io import replace_file
from hf_qknorm.stats.plotting import COLD, GRID, HOT, INK, by_doublings, cells, logit_scale
from hf_qknorm.training.logit_log import LayerSample, LogitSample

WORST = 6  # heads with a curve
CURVES = ("#c8553d", "#2a7f9e", "#4d4d4d", "#d99a2b", "#7a5195", "#5b8c5a")  # for every kind of colour vision, nearly
DRAWN = 400  # steps: with more, each column is the worst of several
LARGEST = 1e12  # beyond, a number is drawn there: axes have no room for the largest floats

Head = tuple[str, int]


def draw_log(samples: Sequence[LogitSample], path: str | Path) -> None:
    """Draw what `read_log` gave as a PNG at `path`, which is written whole or not at all.

    The maps show each layer's worst head, dark is at risk; colours go by the cap and by the entropy of even attention.
    Below are the curves of the heads with the largest |logit|, and with the least entropy.

    Raises ValueError without a sample.
    """
    if not samples:
        raise ValueError("there is nothing to draw: the log holds no sample yet")
    layers = list(dict.fromkeys(name for sample in samples for name in sample.layers))
    last = next(layer for layer in samples[-1].layers.values())
    even = max(0.1, *(layer.even for sample in samples for layer in sample.layers.values()))
    height = min(max(5.4 + 0.2 * len(layers), 6.4), 12.0)
    figure = Figure(figsize=(12, height), layout="constrained")
    maps, curves = figure.subplots(2, 2, height_ratios=(max(0.2 * len(layers), 1.2), 2.6))
    spans = _spans(samples)
    logits = _rows(spans, layers, lambda layer: max(_drawable(layer.max_logit), default=math.nan), max)
    bar = cells(
        figure, maps[0], logits, logit_scale(last.cap), HOT, "largest |logit| of the worst head, before any cap"
    )
    by_doublings(bar, last.cap)
    entropies = _rows(spans, layers, lambda layer: min(_drawable(layer.entropy), default=math.nan), min)
    bar = cells(figure, maps[1], entropies, Normalize(0, even), COLD, "attention entropy of the sharpest head (nats)")
    bar.locator = MaxNLocator(nbins=5)
    for axes in maps:
        places = range(0, len(spans), -(-len(spans) // 10))
        axes.set_xticks(places, labels=[str(spans[i][-1].step) for i in places])
        axes.set_xlabel("step", color=INK)
        axes.set_yticks(range(0, len(layers), -(-len(layers) // 24)))
        axes.set_ylabel("layer", color=INK)
    _curves(curves[0], samples, layers, "max_logit", lambda values: -max(values))
    _curves(curves[1], samples, layers, "entropy", min)
    told = "largest |logit|"
    for limit, style, look in ((last.cap, ":", "dotted"), (2 * last.cap, "--", "dashed")):
        if curves[0].get_ylim()[1] > limit:
            curves[0].axhline(limit, color=GRID, linewidth=1, linestyle=style)
            told += f", {look}: {limit:g}"
    curves[0].set_ylabel(told, color=INK)
    curves[1].set_ylabel("attention entropy (nats)", color=INK)
    heads = len(last.max_logit)
    figure.suptitle(_title(samples, len(layers), heads), fontsize=11, color=INK)
    replace_file(Path(path), lambda temporary: figure.savefig(temporary, dpi=150, format="png"))


def _title(samples: Sequence[LogitSample], layers: int, heads: int) -> str:
    first, last = samples[0].step, samples[-1].step
    return f"Attention in training: {layers} layers of {heads} heads, {len(samples)} samples of steps {first} to {last}"


def _spans(samples: Sequence[LogitSample]) -> list[Sequence[LogitSample]]:
    """The samples in columns, no more than can be drawn."""
    size = -(-len(samples) // DRAWN)
    return [samples[i : i + size] for i in range(0, len(samples), size)]


def _rows(
    spans: Sequence[Sequence[LogitSample]],
    layers: Sequence[str],
    of_layer: Callable[[LayerSample], float],
    worst: Callable[..., float],
) -> list[list[float]]:
    """A row a layer: of each column the worst; NaN where nothing is known."""

    def cell(span: Sequence[LogitSample], name: str) -> float:
        found = [of_layer(sample.layers[name]) for sample in span if name in sample.layers]
        return worst(_known(found), default=math.nan)

    return [[cell(span, name) for span in spans] for name in layers]


def _curves(
    axes: Any,
    samples: Sequence[LogitSample],
    layers: Sequence[str],
    field: str,
    rank: Callable[[Sequence[float]], float],
) -> None:
    """The curves of the heads that rank first in any sample."""
    found: dict[Head, list[tuple[int, float]]] = {}
    for sample in samples:
        for name, layer in sample.layers.items():
            for head, value in enumerate(_drawable(getattr(layer, field), keep=True)):
                found.setdefault((name, head), []).append((sample.step, value))
    known = {head: _known([value for _, value in points]) for head, points in found.items()}
    worst = sorted((head for head in found if known[head]), key=lambda head: rank(known[head]))[:WORST]
    for (name, head), colour in zip(worst, CURVES, strict=False):
        steps, values = zip(*found[name, head], strict=True)
        label = f"layer {layers.index(name)}, head {head}"
        axes.plot(
            steps, values, color=colour, linewidth=1.4, marker="o" if len(steps) < 40 else "", markersize=3, label=label
        )
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    axes.tick_params(length=2, colors=INK, labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if worst:
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), labelcolor=INK)


def _drawable(values: Sequence[float], *, keep: bool = False) -> list[float]:
    """The numbers where they can be drawn; what is none is left out, or a gap if its place is to be kept."""
    limited = [max(min(value, LARGEST), -LARGEST) if math.isfinite(value) else math.nan for value in values]
    return limited if keep else _known(limited)


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
