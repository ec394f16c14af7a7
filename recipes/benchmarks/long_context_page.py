"""The page of `long_context.py`: tables, and the verdicts by its rules."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from run_log import Row

BASE = "unpatched"
LOSS, SHARE, COPIES = 0.01, 0.05, 0.5  # nats, and shares of characters, of the rules


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences over rows, and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float], others: Sequence[float]) -> Difference:
        apart = [a - b for a, b in zip(values, others, strict=True)]
        return cls(statistics.fmean(apart), statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0)

    def above(self, limit: float) -> bool:
        """Whether it is above the limit, and above twice its standard error."""
        return self.mean > limit and self.mean > 2 * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.error:.3f}"


def spans(edges: list[int]) -> list[str]:
    return [f"{low} to {high - 1}" for low, high in zip(edges, edges[1:], strict=False)]


def stretch(run: Row, index: int) -> list[float]:
    """The losses of all rows in one stretch of positions."""
    return [row[index] for row in run["losses"]]


def part(run: Row, length: int, beyond: bool) -> list[float]:
    """The loss of each row over the positions within the trained length, or beyond it."""
    pairs = list(zip(run["edges"], run["edges"][1:], strict=False))
    chosen = [i for i, (low, _) in enumerate(pairs) if (low >= length) == beyond]
    widths = [pairs[i][1] - pairs[i][0] for i in chosen]
    weighted = ([row[i] * width for i, width in zip(chosen, widths, strict=True)] for row in run["losses"])
    return [sum(values) / sum(widths) for values in weighted]


def loses_context(run: Row, base: Row, length: int) -> Difference:
    """The rise beyond the trained length less the rise within it."""
    rises = {}
    for beyond in (False, True):
        mine, others = part(run, length, beyond), part(base, length, beyond)
        rises[beyond] = [a - b for a, b in zip(mine, others, strict=True)]
    return Difference.of(rises[True], rises[False])


def positions_table(runs: dict[str, Row], length: int) -> list[str]:
    """Losses by position of a model's arms: the unpatched model's, and the others' rises over them."""
    base = runs[BASE]
    names = spans(base["edges"])
    lines = [f"| | knee | {' | '.join(names)} | rise beyond {length} less rise within | long context |",
             f"|---|---:|{'---:|' * (len(names) + 1)}---|"]  # fmt: skip
    losses = [statistics.fmean(stretch(base, i)) for i in range(len(names))]
    lines.append(f"| {BASE}, loss | | {' | '.join(f'{loss:.3f}' for loss in losses)} | | |")
    for arm, run in runs.items():
        if arm == BASE:
            continue
        rises = [Difference.of(stretch(run, i), stretch(base, i)) for i in range(len(names))]
        apart = loses_context(run, base, length)
        verdict = "**lost**" if apart.above(LOSS) else "kept"
        lines.append(f"| {arm} | {run['knee']:g} | {' | '.join(map(str, rises))} | {apart} | {verdict} |")
    return lines


def copies(run: Row) -> bool:
    """Whether a model copies random characters over the shortest distance."""
    return statistics.fmean(next(iter(run["copying"]["random"].values()))["right"]) >= COPIES


def kinds_table(run: Row) -> list[str]:
    """What the unpatched model predicts of each kind's second copy."""
    distances = list(run["copying"]["random"])
    lines = [f"| span | | {' | '.join(distances)} |", f"|---|---|{'---:|' * len(distances)}"]
    for kind, found in run["copying"].items():
        right = [statistics.fmean(found[d]["right"]) for d in distances]
        first = [statistics.fmean(found[d]["right_first"]) for d in distances]
        gain = [Difference.of(found[d]["second"], found[d]["first"]) for d in distances]
        lines.append(f"| {kind} | right in the second copy (in the first) | "
                     f"{' | '.join(f'{a:.0%} ({b:.0%})' for a, b in zip(right, first, strict=True))} |")  # fmt: skip
        lines.append(f"| | loss of the second copy less that of the first | {' | '.join(map(str, gain))} |")
    return lines


def lost_copying(run: Row, base: Row) -> dict[str, Difference]:
    """By distance, the share of right characters that is lost."""
    mine, others = run["copying"]["random"], base["copying"]["random"]
    return {d: Difference.of(others[d]["right"], mine[d]["right"]) for d in mine}


def copying_table(runs: dict[str, Row]) -> list[str]:
    """The share of right characters in the second copy, by arm and distance."""
    base = runs[BASE]
    distances = list(base["copying"]["random"])
    lines = [f"| | {' | '.join(distances)} | copying |", f"|---|{'---:|' * len(distances)}---|"]
    for arm, run in runs.items():
        cells = []
        for d in distances:
            right = run["copying"]["random"][d]["right"]
            cells.append(f"{statistics.fmean(right):.0%} ± {100 * Difference.of(right, [0.0] * len(right)).error:.0f}")
        lost = [d for d, apart in lost_copying(run, base).items() if apart.above(SHARE)]
        verdict = "" if arm == BASE else f"**lost** at {', '.join(lost)}" if lost else "kept"
        lines.append(f"| {arm} | {' | '.join(cells)} | {verdict} |")
    return lines


def model_section(name: str, runs: dict[str, Row], length: int) -> list[str]:
    """The tables of a model."""
    base = runs[BASE]
    lines = [f"## {name}", "", "Loss by position, and rises over it:", "", *positions_table(runs, length), ""]
    able = "copies" if copies(base) else "**does not copy**"
    lines += [f"This model, unpatched, {able}. By the distance from a span to its copy:", "", *kinds_table(base), ""]
    if copies(base):
        lines += ["Random spans, share of right characters in the second copy, by arm:", "", *copying_table(runs), ""]
    return lines


def page(sections: dict[str, dict[str, Row]], length: int, description: str, made: str, plot: str) -> str:
    """Format the results as Markdown; `sections` are the runs by model and arm."""
    lines = ["# Long context, before and after a conversion", "", description, "", made, "", f"![plot]({plot})", ""]
    for name, runs in sections.items():
        lines += model_section(name, runs, length)
    return "\n".join(lines)
