"""Continue the training of a trained model on text of another kind, at rates from usual to a hundred times that.

    python recipes/continue.py --checkpoint ../shared/checkpoints/llama-shakespeare \\
        --known ../shared/data/tinyshakespeare.txt --text ../shared/data/wikitext2-valid.txt
    python recipes/continue.py --size gpu --device cuda --known corpus.txt --text other.txt --jobs 1 --minutes 9

Does a converted model train on where the unpatched one goes astray, does it end better, and what does a fault cost?
Each run trains the model for 300 steps of 4×128 tokens (`--size cpu`): AdamW with weight decay 0.1 on matrices, or
Muon, 30 steps of warm-up, a cosine to a tenth of the rate, gradients clipped at 1, no dropout, bf16 autocast over fp32
weights, in training and judging (on a CPU without AVX-512, its products are those of the bf16 numbers in fp32, rounded
once). Within a seed all arms see the same batches; nothing else depends on the seed, so that the spread over seeds does
not cover other models and texts. The held-out loss is over 16 batches of 8×128 tokens from the last tenth of the new
text. Knee and gains come from the text that the model knows, with norms of sharpness 8. QuacK's τ is the one of 0.1,
0.3, 1 and 3 with the smallest mean loss at the second and the fourth rate, with a seed that is not used again.

The rules, fixed before the runs. An arm's best rate has the smallest mean loss over the seeds. An arm "ends better" if
its loss at its best rate is below the unpatched model's at that one's best rate by more than twice the standard error,
paired over seeds. A rate is "within m" if no seed ends more than m above the arm's own best loss (the mean at its best
rate) at it or at any rate from the best one up to it; the page has m = 0.1, 0.2, 0.3 and 0.5. (Smaller rates than the
best one counted too until the runs of llama-shakespeare were under way: they would turn Muon's 0.01 at m = 0.1 into
none, and change nothing else there.) The sensitivity to the rate is that of
Wortsman et al. 2023 (arXiv 2309.14322): the mean over the rates of min(loss, loss before training) minus the best loss.
The loss before training, like those during it, is over the first of the 16 held-out batches alone (with `--size gpu`,
the first 2 of 8).
Faults happen at half of the run, at the middle rate: a batch of random tokens, or five steps at twice the rate. The
fall is the largest held-out loss of the next 20 steps minus that at the fault. A run came back if it ends at most 0.02
nats above the same run without the fault.

An arm that is "opened and removed" raises its knee to infinity in the last quarter of the run, and is judged as the
plain model, after `remove_norms`. `--size real` is for a model of 135 M parameters on a CPU, in 60 steps of 4×256
tokens: its plan, fixed before the runs, is SmolLM2 on Shakespeare at 1e-4, 1e-3 and 3e-3, with AdamW and Muon, two
seeds. `--size real-long` has 200 steps, and asks whether 60 were too few: its plan, fixed before the runs, has the same
text, rates and seeds; its order is AdamW at 1e-4, then at 1e-3, then the rest. At 3e-3 the loss of each converted model
jumped in one of the two seeds, the unpatched model's in none. Is that chance? Six seeds of the unpatched model and of
kept knees at that rate ask it, four of them new: planned after that result and before these runs. A difference holds
if it is more than twice its standard error, paired over seeds.

`--size gpu` first trains a Llama of 60 M parameters on the known text unless a checkpoint is given, and then takes 79 M
tokens per run; it has not been run yet. With `--minutes` the recipe stops in time and continues when it is called
again. Writes a page, its runs and plots.
"""

from __future__ import annotations

import logging
import math
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "benchmarks"))

import torch
from continued_arms import ARMS, TAUS
from continued_page import Faulty, Grid, conclusions, faults_section, plots_section, precision_section, rates_section
from continued_plots import FRONT, plot_rates, plot_steps
from continued_run import AFTER, FAULTS, SIZES, Sources, corpus, prepare, run_one
from run_log import Row, Runs, provenance
from transformers import HfArgumentParser

from hf_qknorm.calibration.knees import SHARPNESS
from hf_qknorm.files.atomic_io import replace_text

TUNING_SEED = 99
PARTS = ("rates", "fp32", "faults")
FP32_ARMS = ("unpatched", "qk_norm_cap, knee", "qk_norm_cap, knee lowered")
FAULT_ARMS = ("unpatched", "soft_cap", "qk_norm_cap, knee", "qk_norm_cap, knee lowered", "QK-Clip 30")


@dataclass
class Options:
    """The options of the comparison."""

    checkpoint: str | None = None
    known: str | None = field(
        default=None, metadata={"help": "the text that the model knows; default: Python's library"}
    )
    text: str | None = field(default=None, metadata={"help": "the text to learn; default: Python's library"})
    size: str = field(default="cpu", metadata={"choices": list(SIZES)})
    rates: list[float] = field(default_factory=lambda: [3e-4, 1e-3, 3e-3, 1e-2, 3e-2])
    seeds: int = 3
    arms: list[str] = field(default_factory=lambda: list(ARMS))
    parts: list[str] = field(default_factory=lambda: list(PARTS), metadata={"choices": PARTS})
    fp32_seeds: int = 1
    device: str = "cpu"
    jobs: int = 2
    minutes: float = math.inf
    work: Path = Path("continued")
    out: Path = Path("recipes/results/continue")

    def __post_init__(self) -> None:
        if unknown := set(self.arms) - set(ARMS):
            raise ValueError(f"arms {sorted(unknown)}: expected some of {', '.join(ARMS)}")
        if "unpatched" not in self.arms:
            raise ValueError(f"arms {self.arms}: expected unpatched among them, which the others are held against")
        self.rates = sorted(self.rates)

    @property
    def sources(self) -> Sources:
        return Sources(self.checkpoint, self.known, self.text, self.work, self.device)

    @property
    def command(self) -> str:
        """The command of the page, with the options that decide its numbers."""
        lines = ["python recipes/continue.py"]
        for name, value in asdict(self).items():
            if name not in ("device", "jobs", "minutes", "work", "out") and value != getattr(Options(), name):
                lines.append(shlex.join([f"--{name}", *map(str, value if isinstance(value, list) else [value])]))
        return " \\\n    ".join(lines)


class Plan:
    """The settings of all runs, by part."""

    def __init__(self, options: Options) -> None:
        size, sources, self.options = SIZES[options.size], options.sources, options
        self.text = corpus(sources.text, sources.checkpoint, size.characters)
        self.common = {
            "model": sources.name,
            "text": self.text.name,
            "known": corpus(sources.known, sources.checkpoint, size.characters).name,
            "size": asdict(size),
        }

    def run(self, arm: str, rate: float, seed: int, fault: str = "none", precision: str = "bf16", **more: float) -> Row:
        named = {"arm": arm, "rate": rate, "seed": seed, "fault": fault, "precision": precision, **more}
        if ARMS[arm].start == "knee":
            named["sharpness"] = SHARPNESS  # a log may have runs with norms of sharpness 1 too
        return {**named, **self.common}

    def tuning(self) -> list[Row]:
        """The runs that choose QuacK's τ."""
        rates = self.options.rates[1::2] if "QuacK" in self.options.arms else []
        return [self.run("QuacK", rate, TUNING_SEED, tau=tau) for tau in TAUS for rate in rates]

    def rates(
        self, seeds: int | None = None, *, arms: list[str] | None = None, precision: str, tau: float
    ) -> list[Row]:
        """The runs over the rates, whole seeds first."""
        return [
            self.run(arm, rate, seed, precision=precision, **({"tau": tau} if arm == "QuacK" else {}))
            for seed in range(self.options.seeds if seeds is None else seeds)
            for arm in (self.options.arms if arms is None else arms)
            for rate in self.options.rates
        ]

    def faults(self) -> list[Row]:
        rate = self.options.rates[len(self.options.rates) // 2]
        return [
            self.run(arm, rate, seed, fault)
            for seed in range(self.options.seeds)
            for arm in FAULT_ARMS
            if arm in self.options.arms
            for fault in FAULTS
        ]

    def parts(self, tau: float) -> dict[str, list[Row]]:
        """The runs of the chosen parts."""
        some = [arm for arm in FP32_ARMS if arm in self.options.arms]
        every = {
            "rates": self.rates(precision="bf16", tau=tau),
            "faults": self.faults(),
            "fp32": self.rates(self.options.fp32_seeds, arms=some, precision="fp32", tau=tau),
        }
        return {part: wanted for part, wanted in every.items() if part in self.options.parts}


def best_tau(plan: Plan, runs: Runs) -> tuple[float, dict[float, float]]:
    """Return the τ with the smallest mean loss of the tuning runs (1 without any), and all of these means."""
    losses: dict[float, list[float]] = {}
    for settings in plan.tuning():
        if (run := runs.find(settings)) is not None:
            losses.setdefault(settings["tau"], []).append(run["held_out"])
    means = {tau: statistics.fmean(ends) for tau, ends in losses.items()}
    return min(means, key=means.__getitem__, default=1.0), means


def grids(wanted: list[Row], runs: Runs) -> dict[str, Grid]:
    """The runs by arm and rate."""
    found: dict[str, dict[float, list[Row]]] = {}
    for settings in wanted:
        if (run := runs.find(settings)) is not None:
            found.setdefault(settings["arm"], {}).setdefault(settings["rate"], []).append(run)
    return {arm: Grid(rates) for arm, rates in found.items()}


def faulty(wanted: list[Row], runs: Runs) -> list[Faulty]:
    """The runs with faults, and the same runs without, by arm and fault."""
    cases: dict[tuple[str, str], Faulty] = {}
    for settings in wanted:
        key = settings["arm"], settings["fault"]
        run, whole = runs.find(settings), runs.find({**settings, "fault": "none"})
        if run is not None and whole is not None:
            case = cases.setdefault(key, Faulty(*key))
            case.runs.append(run)
            case.whole.append(whole)
    return list(cases.values())


def write(plan: Plan, runs: Runs, tau: float, means: dict[float, float]) -> str:
    """Write the page and its plots beside the runs; return the page."""
    options, parts, size, ngrams = plan.options, plan.parts(tau), SIZES[plan.options.size], plan.text.ngrams()
    arms = grids(parts["rates"], runs)
    plots = [options.out.with_name(f"{options.out.name}{ending}.png") for ending in ("", "-steps", "-front")]
    plot_rates(arms, ngrams, plots[0])
    plot_steps(arms, plots[1])
    plot_rates({arm: arms[arm] for arm in FRONT if arm in arms}, ngrams, plots[2])
    sections = [*rates_section(arms)]
    if "faults" in parts:
        sections += faults_section(faulty(parts["faults"], runs), size.steps // 2, AFTER)
    if "fp32" in parts:
        sections += precision_section(arms, grids(parts["fp32"], runs))
    if means:
        tried = ", ".join(f"{mean:.4f} with {each:g}" for each, mean in means.items())
        edge = " The best is the smallest tried: a smaller one may be better." if tau == min(means) else ""
        edge += " It also multiplies all steps of queries and keys; a constant factor alone is not among the arms."
        sections += [f"QuacK's τ, by the mean loss of its tuning runs: {tried}.{edge}", ""]
    question, _, setting, rules, real, *_ = (__doc__ or "").split("\n\n")
    about = f"`{size}`; it knows {plan.common['known']}, and learns {plan.common['text']}; {options.seeds} seeds."
    tables = " and ".join(f"{loss:.3f} (a {name} table)" for name, loss in ngrams.items())
    counted = f"Tables that count the new text's tokens, with 0.1 added to each count, reach {tables}."
    top = [
        f"# Continued training: {plan.common['model']}",
        f"```\n{options.command}\n```",
        question,
        setting,
        rules,
        *([real] if options.size.startswith("real") else []),
        about,
    ]
    lines = [line for paragraph in [*top, *([counted] if ngrams else []), provenance(runs.used)]
             for line in (paragraph, "")]  # fmt: skip
    lines += [*conclusions(arms), *plots_section(plots[:1]), *sections, *plots_section(plots[1:2])]
    text = "\n".join(lines).rstrip() + "\n"
    replace_text(options.out.with_suffix(".md"), text)
    return text


def main(arguments: list[str] | None = None) -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses(arguments)
    logging.getLogger("hf_qknorm").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * options.minutes
    runs, plan = Runs(options.out.with_suffix(".jsonl")), Plan(options)
    run = partial(run_one, sources=options.sources, end=end)

    def finish(wanted: list[Row]) -> bool:
        return runs.run_all(wanted, run, options.jobs, (end - time.monotonic()) / 60)

    starts = {ARMS[arm].start for arm in options.arms}
    whole = prepare(options.sources, SIZES[options.size], starts, end) and finish(plan.tuning())
    tau, means = best_tau(plan, runs)
    if whole and all(finish(wanted) for wanted in plan.parts(tau).values()):
        print(write(plan, runs, tau, means))
    else:
        print("Time is up: give the same command again to continue.")


if __name__ == "__main__":
    main()
