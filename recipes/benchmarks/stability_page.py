"""The page of the sweep of learning rates: its tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from arms import ALL_ARMS
from markdown_table import table
from paired import standard_error
from run_log import Row
from stability_table import MARGINS, REFERENCES, Sweep
from stability_verdicts import verdicts

ENDS = {"qkv": "QKV", "proj": "Proj", "fc1": "FC1", "fc2": "FC2"}


def rate_cell(rate: float | None, baseline: float | None = None, top: float | None = None) -> str:
    """A rate and how many times the baseline's it is; at the `top` of the grid, where it may be more."""
    if rate is None:
        return "–"
    least = "≥ " if rate == top else ""
    return f"{least}{rate:g}" + (f" ({least}×{rate / baseline:.3g})" if baseline else "")


def mean_cell(values: list[float], signed: bool = False) -> str:
    """The mean and, of several finite values, the standard deviation."""
    several = len(values) > 1 and all(map(math.isfinite, values))
    spread = f" ± {statistics.stdev(values):.3f}" if several else ""
    mean = statistics.fmean(values)
    return f"{mean:+.3f}{spread}" if signed else f"{mean:.3f}{spread}"


def factor_cell(found: Sweep, arm: str) -> str:
    """The range of an arm's largest stable rate over the baseline's, in every way to judge."""
    rates = list(zip(found.stable_everyway(arm), found.stable_everyway("baseline"), strict=True))
    factors = [rate / other for rate, other in rates if rate is not None and other is not None]
    if not factors:
        return "–"
    least = "≥ " if any(rate == found.rates[-1] for rate, _ in rates) else ""
    low, high = (f"×{end(factors):.3g}" for end in (min, max))
    low = "none" if any(rate is None for rate, _ in rates) else low
    extent = low if low == high and not least else f"{low} to {least}{high}"
    higher = sum((rate or 0.0) > (other or 0.0) for rate, other in rates)
    return f"{extent} (higher in {higher} of {len(rates)})"


def summary(found: Sweep) -> list[str]:
    """The table of all arms."""
    head = ["arm", "seeds", "best loss, at rate", "sensitivity", "all seeds under the bigram up to"]
    head += ["under the trigram up to", "largest stable rate, times the baseline's", "paper (830M)"]
    rows = []
    for arm, grid in found.grids.items():
        best, paper = grid.best[1], ALL_ARMS[arm].paper
        loss = f"{mean_cell(grid.losses(best))}, {best:g}" if math.isfinite(best) else "–"
        limits = [rate_cell(grid.stable(limit), top=found.rates[-1]) for limit in (found.bigram, found.trigram)]
        factor = "1" if arm == "baseline" else factor_cell(found, arm)
        rows.append([arm, str(grid.seeds), loss, mean_cell(grid.sensitivities()), *limits, factor])
        rows[-1].append(rate_cell(paper, ALL_ARMS["baseline"].paper if arm != "baseline" else None))
    return table(head, rows)


def stable_rates(found: Sweep) -> list[str]:
    """The tables of largest stable rates: one for each reference, a column for each margin."""
    lines = []
    for reference, meaning in REFERENCES.items():
        lines += [f"Largest stable rate against {meaning}, by margin:", ""]
        rows = []
        for arm in found.grids:
            cells = []
            for margin in MARGINS:
                other = None if arm == "baseline" else found.stable("baseline", reference, margin)
                cells.append(rate_cell(found.stable(arm, reference, margin), other, found.rates[-1]))
            rows.append([arm, *cells])
        lines += table(["arm", *(f"+{margin:g}" for margin in MARGINS)], rows)
    lines += ["Largest stable rate of each seed against its own best, by margin:", ""]
    rows = [
        [arm, *(", ".join(map(rate_cell, grid.stable_seeds(margin))) for margin in MARGINS)]
        for arm, grid in found.grids.items()
    ]
    return lines + table(["arm", *(f"+{margin:g}" for margin in MARGINS)], rows)


def over_rates(found: Sweep, cell: Callable[[list[Row]], str], grams: bool = False) -> list[str]:
    """A table with a column for each rate; `cell` formats the runs of an arm at a rate."""
    rows = [[arm, *(cell(grid.runs[rate]) for rate in found.rates)] for arm, grid in found.grids.items()]
    if grams:
        simple = zip(reversed(found.names), (found.trigram, found.bigram), strict=True)
        rows += [[name, *[f"{loss:.3f}"] * len(found.rates)] for name, loss in simple]
    return table(["arm", *(f"{rate:g}" for rate in found.rates)], rows)


def loss_cell(found: Sweep) -> Callable[[list[Row]], str]:
    """Format mean and spread of held-out losses, with the number of seeds above the bigram and above the trigram."""

    def cell(runs: list[Row]) -> str:
        losses = [run["held_out"] for run in runs]
        marks = [
            f"{count}{letter}"
            for letter, gram in (("b", found.bigram), ("t", found.trigram))
            if (count := sum(not loss <= gram for loss in losses))
        ]
        return mean_cell(losses) + (f" ({marks[0]})" if marks else "")

    return cell


def last(runs: list[Row], column: str) -> float:
    """The median over the runs of the last value of an observed column."""
    return statistics.median(run["seen"][column][-1] for run in runs)


def observed(found: Sweep) -> list[str]:
    """The tables of what was observed at the end of runs."""
    lines = ["Largest |logit| before any cap at the end, and the smallest share of uniform attention's entropy that a"]
    lines += ["head has; medians of seeds:", ""]
    lines += over_rates(found, lambda runs: f"{last(runs, 'logit'):.3g}, {last(runs, 'lowest'):.2g}")
    lines += [f"Root mean square of the outputs of {', '.join(ENDS.values())} at the end, before any norm, in the"]
    lines += ["layer where it is largest; medians of seeds:", ""]
    return lines + over_rates(found, lambda runs: ", ".join(f"{last(runs, kind):.3g}" for kind in ENDS))


def between(found: Sweep, reference: str, other: str | None = None) -> list[str]:
    """The table of arms' distances from an arm, seed by seed; and their share of the distance of an `other` arm.

    There is no share where the other arm's distance is within two standard errors of 0.
    """

    def apart(arm: str, rate: float) -> list[float]:
        pairs = zip(found.grids[arm].runs[rate], found.grids[reference].runs[rate], strict=False)
        return [run["held_out"] - against["held_out"] for run, against in pairs]

    distances = {
        arm: [distance for rate in found.rates for distance in apart(arm, rate)]
        for arm in found.grids
        if arm != reference
    }
    rows = [[arm, *(mean_cell(apart(arm, rate), signed=True) for rate in found.rates)] for arm in distances]
    head = ["arm", *(f"{rate:g}" for rate in found.rates)]
    whole = distances.get(other or "", [0.0])
    if abs(statistics.fmean(whole)) > 2 * standard_error(whole):
        head.append(f"share of {other}'s")
        shares = {arm: statistics.fmean(values) / statistics.fmean(whole) for arm, values in distances.items()}
        rows = [[*cells, f"{shares[cells[0]]:.0%}"] for cells in rows]
    return table(head, rows)


def steps_cell(runs: list[Row]) -> str:
    """The medians over a run's steps of mean |Δlogit| of the queries' and of the keys' part of a step; of all seeds."""
    return ", ".join(f"{_typical(runs, column):.2g}" for column in ("query_step", "key_step"))


def _typical(runs: list[Row], column: str) -> float:
    values = list(chain.from_iterable(run["seen"][column][1:] for run in runs))  # the first is in the warm-up
    return statistics.median(values) if values else math.nan


def page(sweeps: dict[str, Sweep], about: list[str], plots: dict[str, list[Path]]) -> str:
    """Format the results as Markdown, after paragraphs about the runs; `plots` are beside the page."""
    found = sweeps["rates"]
    lines = ["# The largest stable learning rate", "", *(line for paragraph in about for line in (paragraph, ""))]
    lines += [f"A bigram table scores {found.bigram:.3f} on the held-out text, a trigram table {found.trigram:.3f}."]
    lines += ["Losses are in nats a character, with the standard deviation over the seeds.", ""]
    if "baseline" in found.grids:
        lines += ["## The sweep", "", *summary(found), *verdicts(found), *stable_rates(found)]
        lines += ["Held-out loss, with the number of seeds above the bigram (b) or else above the trigram (t):", ""]
        lines += [*over_rates(found, loss_cell(found), grams=True), *observed(found), *_images(plots["rates"])]
    titles = {"qkv": "Between qk_norm and qkv_norm", "quack": "QuacK and a constant factor"}
    for part, title in titles.items():
        found = sweeps[part]
        if not found.grids:
            continue
        lines += [f"## {title}", "", "Held-out loss, with the same marks:", ""]
        lines += over_rates(found, loss_cell(found), grams=True)
        reference, other = next(iter(found.grids)), "qkv_norm" if part == "qkv" else None
        lines += [f"Distance from `{reference}`, seed by seed:", "", *between(found, reference, other)]
        if part == "quack":
            lines += [
                "Mean |Δlogit| that the queries' part of a step causes, and the keys' part; medians of the steps:"
            ]
            lines += ["", *over_rates(found, steps_cell), *_images(plots["quack"])]
    return "\n".join(lines).rstrip("\n") + "\n"


def _images(plots: list[Path]) -> list[str]:
    return [line for plot in plots for line in (f"![{plot.stem}]({plot.name})", "")]
