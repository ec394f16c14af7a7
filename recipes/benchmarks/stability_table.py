"""The rules that judge the runs of the sweep of learning rates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from run_log import Row

MARGINS = (0.1, 0.2, 0.3, 0.5)  # nats above the reference: diverged
REFERENCES = {"own": "the arm's own best", "baseline": "the baseline's best"}


def diverged(run: Row, bigram: float, limit: float = math.inf) -> bool:
    """The rule: a loss that is not finite, or a held-out loss above the bigram table's or above `limit` at the end."""
    finite = all(map(math.isfinite, [*run["losses"], run["held_out"]]))
    return not finite or run["held_out"] > min(bigram, limit)


def largest_stable(rates: tuple[float, ...], unstable: Callable[[float], bool]) -> float | None:
    """Return the last of the rising `rates` before the first unstable one; None if there is none."""
    stable = None
    for rate in rates:
        if unstable(rate):
            break
        stable = rate
    return stable


@dataclass(frozen=True)
class Grid:
    """The runs of one arm: a list per rate, one run per seed; every rate has the same seeds."""

    runs: dict[float, list[Row]]
    bigram: float

    @cached_property
    def rates(self) -> tuple[float, ...]:
        return tuple(self.runs)

    @cached_property
    def seeds(self) -> int:
        return len(next(iter(self.runs.values())))

    def losses(self, rate: float) -> list[float]:
        return [run["held_out"] for run in self.runs[rate]]

    def mean(self, rate: float) -> float:
        """Return the held-out loss averaged over seeds; NaN if any seed has none."""
        return statistics.fmean(self.losses(rate))

    @cached_property
    def best(self) -> tuple[float, float]:
        """The smallest mean loss and its rate; NaN if every rate lacks a loss."""
        means = [(self.mean(rate), rate) for rate in self.rates]
        return min((pair for pair in means if math.isfinite(pair[0])), default=(math.nan, math.nan))

    def stable(self, limit: float) -> float | None:
        """Return the largest rate up to which, from the best one on, no seed diverged or ended above `limit`."""
        rates = tuple(rate for rate in self.rates if not rate < self.best[1])
        return largest_stable(rates, lambda rate: any(diverged(x, self.bigram, limit) for x in self.runs[rate]))

    def of_seed(self, seed: int) -> Grid:
        return Grid({rate: [runs[seed]] for rate, runs in self.runs.items()}, self.bigram)

    def stable_seeds(self, margin: float) -> list[float | None]:
        """Return the largest stable rate of each seed, held against its own best."""
        grids = map(self.of_seed, range(self.seeds))
        return [grid.stable(grid.best[0] + margin) for grid in grids]

    def sensitivities(self) -> list[float]:
        """Return the sensitivity to the learning rate of each seed: see the recipe."""
        found = []
        for seed in range(self.seeds):
            runs = [runs[seed] for runs in self.runs.values()]
            bounded = [min(run["held_out"], run["initial"]) for run in runs if math.isfinite(run["held_out"])]
            bounded += [run["initial"] for run in runs if not math.isfinite(run["held_out"])]
            found.append(statistics.fmean(bounded) - min(bounded))
        return found


@dataclass(frozen=True)
class Sweep:
    """The arms of a part that have runs at all of its rates, and the losses of two simple models, with their names.

    For text they are the tables of bigrams and trigrams. A run above the first one's loss, `bigram`, has diverged.
    """

    grids: dict[str, Grid]
    rates: tuple[float, ...]
    bigram: float
    trigram: float
    names: tuple[str, str] = ("bigram table", "trigram table")

    def stable(self, arm: str, reference: str, margin: float) -> float | None:
        """Return an arm's largest stable rate by the margin above the reference, a key of `REFERENCES`."""
        best = self.grids[arm if reference == "own" else "baseline"].best[0]
        return self.grids[arm].stable(best + margin)

    def limits(self) -> dict[str, dict[str, float]]:
        """Return every way to judge: its name, and the loss that each arm's runs must end under."""
        found = {
            f"{meaning} + {margin:g}": {
                arm: self.grids[arm if reference == "own" else "baseline"].best[0] + margin for arm in self.grids
            }
            for reference, meaning in REFERENCES.items()
            for margin in MARGINS
        }
        tables = {f"the {name}": loss for name, loss in zip(self.names, (self.bigram, self.trigram), strict=True)}
        return found | {name: dict.fromkeys(self.grids, loss) for name, loss in reversed(tables.items())}

    def stable_everyway(self, arm: str) -> list[float | None]:
        """Return the largest stable rate of an arm in every way to judge."""
        return [self.grids[arm].stable(losses[arm]) for losses in self.limits().values()]

    @classmethod
    def of(
        cls,
        rows: list[Row],
        arms: list[str],
        rates: tuple[float, ...],
        simple: tuple[float, float],
        names: tuple[str, str] = ("bigram table", "trigram table"),
    ) -> Sweep:
        """Sort log rows; `simple` are the losses of two simple models.

        The seeds of an arm are those with runs at all rates; an arm without any is left out.
        """
        results = {(r["settings"]["arm"], r["settings"]["rate"], r["settings"]["seed"]): r["result"] for r in rows}
        grids = {}
        for arm in arms:
            seeds = [s for s in range(len(rows)) if all((arm, rate, s) in results for rate in rates)]
            if seeds:
                grids[arm] = Grid({rate: [results[arm, rate, s] for s in seeds] for rate in rates}, simple[0])
        return cls(grids, rates, *simple, names)
