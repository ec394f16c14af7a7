"""The page of `long_context.py`: tables, and the verdicts by its rules."""

from __future__ import annotations

import statistics

from markdown_table import table
from paired import Difference, standard_error
from run_log import Row

BASE, SCALED = "unpatched", ", length scale"
LOSS, SHARE, COPIES = 0.01, 0.05, 0.5  # nats, and shares of characters, of the rules


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
    head = ["", "knee", *names, f"rise beyond {length} less rise within", "long context"]
    losses = [statistics.fmean(stretch(base, i)) for i in range(len(names))]
    rows = [[f"{BASE}, loss", "", *(f"{loss:.3f}" for loss in losses), "", ""]]
    for arm, run in runs.items():
        if arm == BASE:
            continue
        rises = [Difference.of(stretch(run, i), stretch(base, i)) for i in range(len(names))]
        apart = loses_context(run, base, length)
        verdict = "**lost**" if apart.above(LOSS) else "kept"
        rows.append([arm, f"{run['knee']:g}", *map(str, rises), str(apart), verdict])
    return table(head, rows, align="l" + "r" * (len(names) + 2) + "l")


def copies(run: Row) -> bool:
    """Whether a model copies random characters over the shortest distance."""
    return statistics.fmean(next(iter(run["copying"]["random"].values()))["right"]) >= COPIES


def kinds_table(run: Row) -> list[str]:
    """The unpatched model's predictions of each kind's second copy, as a table."""
    distances = list(run["copying"]["random"])
    rows = []
    for kind, found in run["copying"].items():
        right = [statistics.fmean(found[d]["right"]) for d in distances]
        first = [statistics.fmean(found[d]["right_first"]) for d in distances]
        gain = [Difference.of(found[d]["second"], found[d]["first"]) for d in distances]
        shares = [f"{a:.0%} ({b:.0%})" for a, b in zip(right, first, strict=True)]
        rows.append([kind, "right in the second copy (in the first)", *shares])
        rows.append(["", "loss of the second copy less that of the first", *map(str, gain)])
    return table(["span", "", *distances], rows, align="ll" + "r" * len(distances))


def lost_copying(run: Row, base: Row) -> dict[str, Difference]:
    """By distance, the share of right characters that is lost."""
    mine, others = run["copying"]["random"], base["copying"]["random"]
    return {d: Difference.of(others[d]["right"], mine[d]["right"]) for d in mine}


def copying_table(runs: dict[str, Row]) -> list[str]:
    """The share of right characters in the second copy, by arm and distance."""
    base = runs[BASE]
    distances = list(base["copying"]["random"])
    rows = []
    for arm, run in runs.items():
        cells = []
        for d in distances:
            right = run["copying"]["random"][d]["right"]
            cells.append(f"{statistics.fmean(right):.0%} ± {100 * standard_error(right):.0f}")
        lost = [d for d, apart in lost_copying(run, base).items() if apart.above(SHARE)]
        verdict = "" if arm == BASE else f"**lost** at {', '.join(lost)}" if lost else "kept"
        rows.append([arm, *cells, verdict])
    return table(["", *distances, "copying"], rows, align="l" + "r" * len(distances) + "l")


def mean_losses(run: Row, length: int, beyond: bool) -> float:
    return statistics.fmean(part(run, length, beyond))


def mean_copying(run: Row, length: int, beyond: bool) -> float:
    """The share of right characters over all distances that are beyond the trained length, or within it."""
    found = run["copying"]["random"]
    return statistics.fmean(statistics.fmean(x["right"]) for d, x in found.items() if (int(d) >= length) == beyond)


def training_section(trainings: list[tuple[Row, Row]], length: int) -> list[str]:
    """The trained models by stage and arm: means over the seeds that all arms of a stage have."""
    lines = ["## After training", ""] if trainings else []
    for stage in dict.fromkeys(settings["stage"] for settings, _ in trainings):
        found: dict[str, dict[int, Row]] = {}
        for settings, run in trainings:
            if settings["stage"] == stage:
                found.setdefault(settings["arm"], {})[settings["seed"]] = run
        seeds = sorted(set.intersection(*(set(runs) for runs in found.values())))
        if not seeds or BASE not in found:
            continue
        arms = {arm: [runs[seed] for seed in seeds] for arm, runs in found.items()}
        lines += [f"Trained {stage}, {len(seeds)} seeds:", "", *training_table(arms, length)]
    return lines


def training_table(arms: dict[str, list[Row]], length: int) -> list[str]:
    head = ["", f"loss within {length}", "beyond", "long context", f"copying within {length}", "beyond", "copying"]
    base, rows = arms[BASE], []
    for arm, runs in arms.items():
        losses = [[mean_losses(run, length, beyond) for run in runs] for beyond in (False, True)]
        copied = [[mean_copying(run, length, beyond) for run in runs] for beyond in (False, True)]
        theirs = [[mean_losses(run, length, beyond) for run in base] for beyond in (False, True)]
        rises = [
            [a - b for a, b in zip(mine, others, strict=True)] for mine, others in zip(losses, theirs, strict=True)
        ]
        apart = Difference.of(rises[1], rises[0])
        lost = Difference.of([mean_copying(run, length, True) for run in base], copied[1])
        cells = [f"{statistics.fmean(x):.3f} ± {standard_error(x):.3f}" for x in losses]
        shares = [f"{statistics.fmean(x):.0%} ± {100 * standard_error(x):.0f}" for x in copied]
        verdicts = ["", ""]
        if arm != BASE:
            verdicts = [f"{'**lost**' if apart.above(LOSS) else 'kept'} ({apart})",
                        f"{'**lost**' if lost.above(SHARE) else 'kept'} ({100 * -lost.mean:+.0f} points)"]  # fmt: skip
        plain = arms.get(arm.removesuffix(SCALED)) if arm.endswith(SCALED) else None
        helped = "" if plain is None else scale_verdict(runs, plain, length)
        rows.append([arm, *cells, verdicts[0], *shares, verdicts[1], helped])
    return table([*head, "length scale"], rows, align="lrrlrrll")


def scale_verdict(scaled: list[Row], plain: list[Row], length: int) -> str:
    """Whether the length scale helps, by the rule, with seeds as the unit."""
    loss = Difference.of(*([mean_losses(run, length, True) for run in runs] for runs in (plain, scaled)))
    copied = Difference.of(*([mean_copying(run, length, True) for run in runs] for runs in (scaled, plain)))
    return verdict_of(loss, copied)


def verdict_of(loss: Difference, copied: Difference) -> str:
    """The verdict on a length scale, from what it takes off the loss and adds to the copying."""
    word = "**helps**" if loss.above(LOSS) or copied.above(SHARE) else "no help"
    points = f"{100 * copied.mean:+.0f} ± {100 * copied.error:.0f} points"
    return f"{word} ({-loss} nats, {points})"


def distant_rows(run: Row, length: int) -> list[float]:
    """The shares of right characters of all rows with a distance beyond the trained length."""
    found = run["copying"]["random"]
    return [share for d, x in found.items() if int(d) >= length for share in x["right"]]


def untrained_scale(runs: dict[str, Row], length: int) -> list[str]:
    """The verdict on a length scale without training, for each arm that has one, with rows as the unit."""
    lines = []
    for arm, run in runs.items():
        plain = runs.get(arm.removesuffix(SCALED)) if arm.endswith(SCALED) else None
        if plain is not None:
            loss = Difference.of(part(plain, length, True), part(run, length, True))
            verdict = verdict_of(loss, Difference.of(distant_rows(run, length), distant_rows(plain, length)))
            lines.append(f"- A length scale on {arm.removesuffix(SCALED)}, beyond {length}: {verdict}.")
    return lines


def model_section(name: str, runs: dict[str, Row], length: int) -> list[str]:
    """The tables of a model."""
    base = runs[BASE]
    lines = [f"## {name}", "", "Loss by position, and rises over it:", "", *positions_table(runs, length)]
    lines += [*untrained_scale(runs, length), ""]
    able = "copies" if copies(base) else "**does not copy**"
    lines += [f"This model, unpatched, {able}. By the distance from a span to its copy:", "", *kinds_table(base)]
    if copies(base):
        lines += ["Random spans, share of right characters in the second copy, by arm:", "", *copying_table(runs)]
    return lines


def conclusions(sections: dict[str, dict[str, Row]], length: int) -> list[str]:
    """The verdicts by the rules, a line per model and question."""
    lines = []
    for name, runs in sections.items():
        base = runs[BASE]
        inside, outside = (statistics.fmean(part(base, length, beyond)) for beyond in (False, True))
        lines.append(f"- {name}, unpatched: {inside:.3f} nats within {length} positions, {outside:.3f} beyond.")
        apart = {arm: loses_context(run, base, length) for arm, run in runs.items() if arm != BASE}
        lost = [f"{arm} ({difference})" for arm, difference in apart.items() if difference.above(LOSS)]
        gained = [f"{arm} ({d})" for arm, d in apart.items() if (-d).above(LOSS)]
        lines.append(f"- {name}: long context is lost by {_listed(lost)}; the loss rises less beyond {length} than "
                     f"within for {_listed(gained)}.")  # fmt: skip
        if copies(base):
            differences = {arm: lost_copying(run, base) for arm, run in runs.items() if arm != BASE}
            far = [f"{arm} (at {', '.join(d for d, x in found.items() if x.above(SHARE))})"
                   for arm, found in differences.items() if any(x.above(SHARE) for x in found.values())]  # fmt: skip
            lines.append(f"- {name}: copying is lost by {_listed(far)}.")
        else:
            lines.append(f"- {name} does not copy, before or after: its distances say nothing about a conversion.")
    return lines


def _listed(items: list[str]) -> str:
    return ", ".join(items) or "no arm"


def page(
    sections: dict[str, dict[str, Row]],
    trainings: list[tuple[Row, Row]],
    length: int,
    description: str,
    made: str,
    plot: str,
) -> str:
    """Format the results as Markdown: `sections` are runs by model and arm, `trainings` settings and results."""
    lines = ["# Long context, before and after a conversion", "", description, "", made, ""]
    lines += ["## In short", "", *conclusions(sections, length), "", f"![plot]({plot})", ""]
    for name, runs in sections.items():
        lines += model_section(name, runs, length)
    lines += training_section(trainings, length)
    return "\n".join(lines)
