"""The results of continued training: comparisons between arms, and the page."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from markdown_table import table
from paired import Difference
from run_log import Row

BACK = 0.02  # nats above the run without a fault, at most: the run came back
MARGINS = (0.1, 0.2, 0.3, 0.5)  # nats above an arm's best loss
JUMP = 2.0  # nats above the loss before training, in a look


@dataclass(frozen=True)
class Grid:
    """The runs of one arm: a list per rate, one run per seed; every rate has the same seeds."""

    runs: dict[float, list[Row]]

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
        stable = None
        for rate in (rate for rate in self.rates if not rate < self.best[1]):
            if any(not math.isfinite(sum(run["losses"])) or not run["held_out"] <= limit for run in self.runs[rate]):
                break
            stable = rate
        return stable

    def sensitivities(self) -> list[float]:
        """Return the sensitivity to the learning rate of each seed: see the recipe."""
        found = []
        for runs in zip(*self.runs.values(), strict=True):
            starts = [run["way"][0][1] for run in runs]  # a loss that is not finite counts as that before training
            ends = [run["held_out"] if math.isfinite(run["held_out"]) else math.inf for run in runs]
            bounded = [min(pair) for pair in zip(ends, starts, strict=True)]
            found.append(statistics.fmean(bounded) - min(bounded))
        return found


def mean_cell(values: list[float]) -> str:
    """The mean and, of several finite values, the standard deviation."""
    several = len(values) > 1 and all(map(math.isfinite, values))
    return f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if several else "")


def at_best(grid: Grid, base: Grid) -> Difference:
    """The difference of two arms, each at its best rate; NaN if one of them diverged at every rate."""
    if not (math.isfinite(grid.best[0]) and math.isfinite(base.best[0])):
        return Difference(math.nan, math.nan)
    return Difference.of(grid.losses(grid.best[1]), base.losses(base.best[1]))


def largest_logit(run: Row) -> float:
    """The largest |logit| before any cap that was seen after the first step."""
    return max(logit for step, _, logit, _ in run["way"] if step)


def last_entropy(run: Row) -> float:
    """The smallest entropy of a head at the end, as a share of that of even attention."""
    return float(run["way"][-1][3])


def jumped(run: Row) -> bool:
    """Whether a held-out loss during the run was more than `JUMP` above that before training."""
    (_, start, *_), *looks = run["way"]
    return any(not loss <= start + JUMP for _, loss, *_ in looks)


def fall(run: Row, half: int, after: int) -> float:
    """The largest held-out loss in the steps after the fault minus the loss at it."""
    since = [(step - half, loss) for step, loss, *_ in run["way"] if 0 <= step - half <= after]
    return max(loss for step, loss in since if step) - next(loss for step, loss in since if step == 0)


def differences(arm: str, grid: Grid, base: Grid) -> list[str]:
    """A row of the arm's held-out losses minus another's at the same rates, paired over seeds."""
    return [arm, *(str(Difference.of(grid.losses(rate), base.losses(rate))) for rate in grid.rates)]


def rates_section(arms: dict[str, Grid]) -> list[str]:
    """The tables over arms and rates."""
    base = arms["unpatched"]
    rates = [f"{rate:g}" for rate in base.rates]
    lines = ["Held-out loss in nats a token, mean ± standard deviation over the seeds:", ""]
    lines += table(["arm", *rates], [[arm, *(mean_cell(g.losses(x)) for x in g.rates)] for arm, g in arms.items()])
    lines += ["The same minus the unpatched model's at the same rate, paired over seeds, ± standard error:", ""]
    lines += table(["arm", *rates], [differences(arm, g, base) for arm, g in arms.items() if arm != "unpatched"])
    muon = arms.get("Muon")
    if rows := [differences(arm, g, muon) for arm, g in arms.items() if muon and arm.startswith("Muon, ")]:
        lines += ["With Muon, minus the unpatched model's with Muon at the same rate:", ""]
        lines += table(["arm", *rates], rows)
    lines += ["At each arm's best rate; the largest rate within a margin of its own best; sensitivity to the rate:", ""]
    head = ["arm", "best rate", "loss there", "minus unpatched's best", "ends", *(f"within {x:g}" for x in MARGINS)]
    rows = []
    for arm, g in arms.items():
        best, rate = g.best
        there = at_best(g, base)
        ends = ["", ""] if arm == "unpatched" else [str(there), there.verdict]
        stable = [g.stable(best + margin) for margin in MARGINS]
        cells = ["–" if x is None else f"{'≥ ' * (x == g.rates[-1])}{x:g}" for x in stable]
        rows.append([arm, f"{rate:g}", f"{best:.3f}", *ends, *cells, mean_cell(g.sensitivities())])
    lines += table([*head, "sensitivity"], rows)
    lines += ["Largest \\|logit\\| after the first step, before any cap, of any seed; smallest entropy share of a head"]
    lines += [
        "at the end, the mean over the seeds. Both are seen on `looked` held-out batches, every `look` steps:",
        "",
    ]
    rows = []
    for arm, g in arms.items():
        cells = [(max(map(largest_logit, runs)), statistics.fmean(map(last_entropy, runs))) for runs in g.runs.values()]
        rows.append([arm, *(f"{logit:,.0f}; {share:.3f}" for logit, share in cells)])
    return lines + table(["arm", *rates], rows)


def precision_section(bf16: dict[str, Grid], fp32: dict[str, Grid]) -> list[str]:
    """The runs in fp32 minus those in bf16 of the same seeds."""
    rows = []
    for arm, g in fp32.items():
        same = [Difference.of(g.losses(x), bf16[arm].losses(x)[: g.seeds]).mean for x in g.rates]
        rows.append([arm, *(f"{g.mean(x):.3f} ({apart:+.3f})" for x, apart in zip(g.rates, same, strict=True))])
    rates = [f"{rate:g}" for rate in next(iter(fp32.values())).rates]
    count = next(iter(fp32.values())).seeds
    lead = f"Held-out loss in fp32 ({count} seed{'s' * (count > 1)}), and its distance from bf16 with the same seeds:"
    top = next(iter(fp32.values())).rates[-1]
    gaps = []
    for arm in (arm for arm in fp32 if arm != "unpatched"):
        pairs = [(grids[arm], grids["unpatched"]) for grids in (fp32, bf16)]
        one, other = (Difference.of(g.losses(top)[:count], base.losses(top)[:count]).mean for g, base in pairs)
        gaps.append(f"{arm} {one:+.3f} in fp32 and {other:+.3f} in bf16")
    apart = f"At {top:g}, minus the unpatched model's loss, with the same seeds: {'; '.join(gaps)}."
    return [lead, "", *table(["arm", *rates], rows), *([apart, ""] if gaps else [])]


@dataclass(frozen=True)
class Faulty:
    """An arm's runs with a fault, and the same runs without."""

    arm: str
    fault: str
    runs: list[Row] = field(default_factory=list)
    whole: list[Row] = field(default_factory=list)


def faults_section(faulty: list[Faulty], half: int, after: int) -> list[str]:
    """How far each arm falls after a fault, and whether it comes back."""
    rows = []
    for case in faulty:
        falls = [fall(run, half, after) for run in case.runs]
        ends, others = ([run["held_out"] for run in runs] for runs in (case.runs, case.whole))
        back = sum(end - other <= BACK for end, other in zip(ends, others, strict=True))
        logit = max(map(largest_logit, case.runs))
        rows.append([case.arm, case.fault, mean_cell(falls), str(Difference.of(ends, others)), f"{back} of {len(ends)}",
                     f"{logit:,.0f}"])  # fmt: skip
    head = ["arm", "fault", "fall", "end, minus the run without", "came back", "largest \\|logit\\|"]
    note = "The runs without a fault are not looked at in these steps: the usual ups and downs are a part of each fall."
    return ["Faults at half of the run:", "", *table(head, rows), note, ""]


def conclusions(arms: dict[str, Grid]) -> list[str]:
    """The answers of the rules, in sentences."""
    base, found = arms["unpatched"], []
    loss, usual = base.best
    best = {arm: at_best(g, base) for arm, g in arms.items() if arm != "unpatched"}
    for verdict, words in (("better", "better than"), ("level", "level with"), ("worse", "worse than")):
        named = [f"{arm} ({apart})" for arm, apart in best.items() if apart.verdict == verdict]
        found.append(f"- Each at its best rate, these end {words} the unpatched model: {'; '.join(named) or 'none'}.")
    if failed := [arm for arm, apart in best.items() if apart.verdict == "diverged"]:
        found.append(f"- Diverged at every rate, or compared with a model that did: {'; '.join(failed)}.")
    for rate in base.rates[-2:]:
        means = {arm: g.mean(rate) for arm, g in arms.items()}
        order = sorted(arms, key=lambda arm: means[arm] if math.isfinite(means[arm]) else math.inf)
        losses = "; ".join(f"{arm} {means[arm] - loss:+.2f}" for arm in order)
        found.append(f"- At {rate:g}, above the unpatched model's best ({loss:.3f} at {usual:g}): {losses}.")
        counts = "; ".join(f"{arm} {sum(map(jumped, g.runs[rate]))} of {g.seeds}" for arm, g in arms.items())
        found.append(f"- Runs at {rate:g} whose loss jumped by more than {JUMP:g} nats in a look: {counts}.")
    steady = sorted(arms, key=lambda arm: statistics.fmean(arms[arm].sensitivities()))
    found.append(f"- From the least sensitive to the rate to the most: {'; '.join(steady)}.")
    found.append(
        "- Twice a standard error is a weak test: with three seeds, chance alone passes it in 18 % of comparisons. A "
        "best rate is chosen on the text that judges it, among rates a factor of about three apart."
    )
    return [*found, ""]


def plots_section(plots: list[Path]) -> list[str]:
    return [line for plot in plots for line in (f"![{plot.stem}]({plot.name})", "")]
