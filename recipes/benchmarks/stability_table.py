"""The result of the sweep of learning rates: the rule that judges runs, and the page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from arms import ARMS
from run_log import Row

MARGIN = 0.3  # nats above the baseline's best: diverged
OTHER_MARGINS = (0.2, 0.5)  # shown as well: the influence of the choice


def diverged(result: Row, best: float, margin: float = MARGIN) -> bool:
    """The rule: a loss that is not finite, or a held-out loss above `best` + `margin` at the end."""
    finite = all(map(math.isfinite, [*result["losses"], result["held_out"]]))
    return not finite or result["held_out"] > best + margin


def largest_stable(rates: list[float], unstable: Callable[[float], bool]) -> float | None:
    """Return the last of the rising `rates` before the first unstable one; None if there is none."""
    stable = None
    for rate in rates:
        if unstable(rate):
            break
        stable = rate
    return stable


@dataclass(frozen=True)
class Sweep:
    """All results, by arm and rate, one per seed."""

    results: dict[str, dict[float, list[Row]]]
    rates: list[float]

    def mean(self, arm: str, rate: float) -> float:
        """Return the held-out loss averaged over seeds; NaN if any seed has none."""
        losses = [result["held_out"] for result in self.results[arm][rate]]
        return sum(losses) / len(losses)

    def best_of(self, arm: str) -> tuple[float, float]:
        """Return the smallest mean loss and its rate; NaN if every rate lacks a loss."""
        reached = [(self.mean(arm, rate), rate) for rate in self.rates]
        return min((pair for pair in reached if math.isfinite(pair[0])), default=(math.nan, math.nan))

    @property
    def best(self) -> float:
        """Return the baseline's loss at its best rate."""
        return self.best_of("baseline")[0]

    def broken(self, arm: str, rate: float, margin: float = MARGIN) -> int:
        """Return the number of seeds that diverged."""
        return sum(diverged(result, self.best, margin) for result in self.results[arm][rate])

    def stable(self, arm: str, margin: float = MARGIN) -> float | None:
        return largest_stable(self.rates, lambda rate: self.broken(arm, rate, margin) > 0)


def rate_cell(rate: float | None, baseline: float | None, top: float | None = None) -> str:
    """A rate and how many times the baseline's it is; at the `top` of the grid, where it may be more."""
    if rate is None:
        return "–"
    least = "≥ " if rate == top else ""
    return f"{least}{rate:g}" + (f" ({least}×{rate / baseline:.3g})" if baseline else "")


def page(found: Sweep, about: list[str], plots: list[Path]) -> str:
    """Format the results as Markdown, after paragraphs about the runs; `plots` are beside the page."""
    margins = (MARGIN, *OTHER_MARGINS)
    head = ["arm", *(f"largest stable rate, +{margin:g}" for margin in margins), "paper (830M)", "best loss, at rate"]
    lines = ["# The largest stable learning rate", ""]
    lines += [line for paragraph in about for line in (paragraph, "")]
    lines += ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for arm in found.results:
        cells = [rate_cell(found.stable(arm, x), found.stable("baseline", x), found.rates[-1]) for x in margins]
        loss, rate = found.best_of(arm)
        cells += [rate_cell(ARMS[arm].paper, ARMS["baseline"].paper), f"{loss:.3f}, {rate:g}"]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    lines += ["", "Held-out loss in nats a character, mean over the seeds, and how many of them diverged:", ""]
    lines += [f"| arm | {' | '.join(f'{rate:g}' for rate in found.rates)} |", "|---" + "|---:" * len(found.rates) + "|"]
    for arm in found.results:
        cells = [f"{found.mean(arm, rate):.3f} ({found.broken(arm, rate)})" for rate in found.rates]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    lines += [line for plot in plots for line in ("", f"![{plot.stem}]({plot.name})")]
    return "\n".join(lines) + "\n"
