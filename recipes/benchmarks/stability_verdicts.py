"""The findings of the sweep of learning rates, as sentences computed from its runs."""

from __future__ import annotations

import math
import statistics
from itertools import groupby

from paired import Difference
from stability_table import Grid, Sweep


def verdicts(found: Sweep) -> list[str]:
    """Return the sentences about the sweep, each a line of a Markdown list."""
    lines = [_against_baseline(found), _best(found), _sensitivity(found), _collapse(found)]
    lines += ["Orderings by the largest stable rate, in every way to judge:"]
    lines += [f"  - {name}: {ordering(found, limits)}" for name, limits in found.limits().items()]
    return [line if line.startswith(" ") else f"- {line}" for line in lines] + [""]


def ordering(found: Sweep, limits: dict[str, float]) -> str:
    """List the arms by their largest stable rate under these losses, the highest first."""
    rates = {arm: grid.stable(limits[arm]) or 0.0 for arm, grid in found.grids.items()}
    ranks = groupby(sorted(rates, key=lambda arm: -rates[arm]), key=lambda arm: rates[arm])
    return " > ".join(f"{', '.join(arms)} ({rate or 'none'}{_more(found, rate)})" for rate, arms in ranks)


def _more(found: Sweep, rate: float) -> str:
    return " or more" if rate == found.rates[-1] else ""


def _against_baseline(found: Sweep) -> str:
    """Sort the arms by how often their largest stable rate is above the baseline's."""
    baseline = found.stable_everyway("baseline")
    kinds: dict[str, list[str]] = {"all": [], "some": [], "none": []}
    for arm in (arm for arm in found.grids if arm != "baseline"):
        pairs = zip(found.stable_everyway(arm), baseline, strict=True)
        above = [(rate or 0.0) > (other or 0.0) for rate, other in pairs]
        kinds["all" if all(above) else "some" if any(above) else "none"].append(arm)
    parts = [f"in {kind} of the {len(baseline)} ways: {', '.join(arms)}" for kind, arms in kinds.items() if arms]
    return f"Stable at a higher rate than the baseline {'; '.join(parts)}."


def _best(found: Sweep) -> str:
    """Order the arms by the loss at their best rate, with the distance from the baseline's, seed by seed."""
    own = found.grids["baseline"]

    def apart(grid: Grid) -> Difference:
        seeds = min(grid.seeds, own.seeds)
        return Difference.of(grid.losses(grid.best[1])[:seeds], own.losses(own.best[1])[:seeds])

    arms = {arm: grid for arm, grid in found.grids.items() if arm != "baseline" and math.isfinite(grid.best[0])}
    listed = ", ".join(f"{arm} {apart(arms[arm])}" for arm in sorted(arms, key=lambda arm: arms[arm].best[0]))
    return f"Each at its best rate, distance of the loss from the baseline's ± its standard error: {listed}."


def _sensitivity(found: Sweep) -> str:
    means = {arm: statistics.fmean(grid.sensitivities()) for arm, grid in found.grids.items()}
    listed = ", ".join(f"{arm} {means[arm]:.2f}" for arm in sorted(means, key=lambda arm: means[arm]))
    return f"Sensitivity to the learning rate, the smallest first: {listed}."


def _collapse(found: Sweep) -> str:
    """State where attention collapses: a head whose entropy fell under a hundredth of uniform attention's."""

    def collapsed(grid: Grid) -> float | None:
        rates = [rate for rate in grid.rates if any(not run["seen"]["lowest"][-1] >= 0.01 for run in grid.runs[rate])]
        return rates[0] if rates else None

    listed = ", ".join(f"{arm} {collapsed(grid) or 'never'}" for arm, grid in found.grids.items())
    return (
        f"Smallest rate at which a head of any seed ended with less than 0.01 of uniform attention's entropy: {listed}."
    )
