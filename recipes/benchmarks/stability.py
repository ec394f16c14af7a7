"""Sweep learning rates: a small GPT-2 at a grid of rates, with each way to bound its attention logits.

    python recipes/benchmarks/stability.py --text tinyshakespeare.txt --jobs 2
    python recipes/benchmarks/stability.py --text tinyshakespeare.txt --jobs 2 --parts qkv
    python recipes/benchmarks/stability.py --text corpus.txt --size gpu --device cuda --jobs 4 --minutes 9

After Rybakov et al. 2024 (arXiv 2410.16682): model, data and rates are the same for every arm, and the result is the
largest rate that does not diverge. The optimizer is Adam with betas 0.9 and 0.95, without weight decay or gradient
clipping, with a short warm-up and then a constant rate: nothing else stabilises a run. Every run is judged at its end
on the last tenth of the text, which is held out, whole; the runs of a seed see the same batches from the same initial
weights. Rates, arms, seeds and these rules were fixed before the runs, after four single runs that showed where the
limits are (`baseline` at 0.016 and 0.064, `qkv_norm` at 0.002, `qk_norm` at 0.064):

- A run has diverged if a loss is not finite, if its held-out loss is above that of a bigram table, or if it is more
  than a margin above a reference. Four margins are shown: 0.1, 0.2, 0.3 and 0.5 nats. Three references are shown: the
  arm's own best (the smallest mean over the seeds at any rate), the baseline's best, and each seed's own best.
- A rate is stable if no seed diverges at it or at any smaller one.
- The sensitivity to the learning rate is that of Wortsman et al. 2023 (arXiv 2309.14322): the mean over the rates of
  min(loss, loss at initialisation), less the best loss. It is computed for each seed.
- A run has learned more than pairs of characters if it ends under the bigram's loss, and uses attention if it ends
  under the trigram's.

`--parts` selects: `rates` is this sweep. `qkv` trains arms between `qk_norm` and `qkv_norm` at two rates, to find the
cause of their distance. `quack` trains QuacK with several τ, by the norms of weights alone, and with a constant factor,
at three rates. `--arms` selects among their arms. By default the text is the source code of Python's library. `--size
gpu` has six layers, 384 wide, in bfloat16 autocast, for texts of up to 30 million characters. An interrupted sweep
continues where it stopped, and no run starts after `--minutes`. Writes a page, its runs and its plots.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from pathlib import Path

import torch
from arms import ALL_ARMS, ARMS, QKV_ARMS, QUACK_ARMS, Arm
from observations import Observations
from run_log import Row, Runs, provenance, thinned
from stability_page import ENDS, page
from stability_table import Sweep
from sweep import Characters, Size, held_out_loss, train
from sweep_plots import plot_losses, plot_outputs, plot_over_steps
from torch.optim import Adam
from transformers import HfArgumentParser

from hf_qknorm.files.atomic_io import replace_text

LOOKS = 20  # times that the model is observed
POINTS = 40  # of its training loss that are kept

SIZES = {
    "quick": Size(layers=1, heads=2, width=16, length=16, batch=4, steps=6, warmup=2, judge=8),
    "cpu": Size(layers=2, heads=2, width=64, length=64, batch=8, steps=2000, warmup=100),
    "gpu": Size(
        layers=6,
        heads=6,
        width=384,
        length=256,
        batch=64,
        steps=3000,
        warmup=150,
        judge=4096,
        characters=30_000_000,
        bf16=True,
    ),
}


@dataclass(frozen=True)
class Part:
    """A grid of runs: every arm at every rate."""

    arms: dict[str, Arm]
    rates: tuple[float, ...]


PARTS = {
    "rates": Part(ARMS, tuple(2e-3 * 2**i for i in range(7))),
    "qkv": Part(QKV_ARMS, (2e-3, 4e-3)),
    "quack": Part(QUACK_ARMS, (4e-3, 8e-3, 16e-3)),
}


@dataclass
class Options:
    """The options of the sweep."""

    text: str | None = None
    size: str = field(default="cpu", metadata={"choices": list(SIZES)})
    parts: list[str] = field(default_factory=lambda: list(PARTS), metadata={"choices": list(PARTS)})
    arms: list[str] = field(default_factory=lambda: list(ALL_ARMS))
    seeds: int = 3
    jobs: int = 2
    minutes: float = math.inf
    device: str = "cpu"
    out: Path = Path("recipes/results/stability")

    def __post_init__(self) -> None:
        if unknown := set(self.arms) - set(ALL_ARMS):
            raise ValueError(f"unknown arms {sorted(unknown)}: expected some of {', '.join(ALL_ARMS)}")


@cache
def load(source: str | None, limit: int) -> Characters:
    return Characters(source, limit=limit)


def run_one(settings: Row, source: str | None, device: str) -> Row:
    """Train one model; return its held-out loss, its training losses, and what was observed over time."""
    size, arm = Size(**{each.name: settings[each.name] for each in fields(Size)}), ALL_ARMS[settings["arm"]]
    text = load(source, size.characters)
    torch.manual_seed(settings["seed"])
    model = size.build(text.vocabulary, arm.scheme)
    arm.change(model)
    model.to(device)
    optimizer = arm.around(model, Adam(model.parameters(), lr=settings["rate"], betas=(0.9, 0.95), fused=True))
    judging = text.judging(size)
    initial = held_out_loss(model, judging)
    seen = Observations(model, judging[0].to(device), max(size.steps // LOOKS, 1))
    batches = text.training(size, settings["seed"])
    losses = train(model, batches, optimizer, warmup=size.warmup, bf16=size.bf16, after_step=seen)
    held_out = held_out_loss(model, judging) if math.isfinite(losses[-1]) else math.nan
    ends = {"held_out": round(held_out, 5), "initial": round(initial, 5)}
    return {**ends, "losses": thinned(losses, POINTS), "seen": seen.columns}


def wanted(options: Options, name: str) -> list[Row]:
    """Return the settings of all runs, in their order: seeds are completed one by one."""
    size = SIZES[options.size]
    shared = {"text": name, **asdict(size)}
    return [
        {"arm": arm, "rate": rate, "seed": seed, **shared}
        for part in options.parts
        for seed in range(options.seeds)
        for arm in PARTS[part].arms
        for rate in PARTS[part].rates
        if arm in options.arms
    ]


def draw(sweeps: dict[str, Sweep], out: Path) -> dict[str, list[Path]]:
    """Draw the plots of the parts that have runs beside `out`; return their paths by part."""
    drawn: dict[str, list[Path]] = {part: [] for part in sweeps}

    def path(part: str, name: str) -> Path:
        drawn[part].append(out.with_name(f"{out.name}-{name}.png"))
        return drawn[part][-1]

    for part, names in {"rates": ("loss", "logits", "entropy"), "quack": ("quack-loss", "quack-steps")}.items():
        found = sweeps[part]
        results = {arm: grid.runs for arm, grid in found.grids.items()}
        if not results:
            continue
        lines = {"bigram table": found.bigram, "trigram table": found.trigram}
        plot_losses(results, lines, path(part, names[0]))
        if part == "quack":
            plot_over_steps(results, "query_step", "mean |Δlogit| of the queries' steps", path(part, names[1]))
            continue
        plot_over_steps(results, "logit", "largest |logit|, before any cap (dashed: 50)", path(part, names[1]), 50)
        plot_over_steps(results, "lowest", "smallest share of uniform attention's entropy", path(part, names[2]))
        shown = {arm: results[arm] for arm in ("baseline", "qk_norm", "QK_FC_norm") if arm in results}
        plot_outputs(shown, ENDS, path(part, "outputs"))
    return drawn


def write(sweeps: dict[str, Sweep], rows: list[Row], settings: str, out: Path) -> None:
    """Write the page with its plots, and print it."""
    about = [*(__doc__ or "").split("\n\n")[2:4], settings, provenance(rows)]
    written = page(sweeps, about, draw(sweeps, out))
    replace_text(out.with_suffix(".md"), written)
    print(written)


def main(arguments: list[str] | None = None) -> dict[str, Sweep]:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses(arguments)
    torch.set_num_threads(1)
    size = SIZES[options.size]
    text = load(options.text, size.characters)
    runs = Runs(options.out.with_suffix(".jsonl"))
    whole = runs.run_all(
        wanted(options, text.name),
        partial(run_one, source=options.text, device=options.device),
        options.jobs,
        options.minutes,
    )
    shared = {"text": text.name, **asdict(size)}
    rows = [row for row in runs.rows if row["settings"].items() >= shared.items()]
    ngrams = text.ngram_losses()
    sweeps = {name: Sweep.of(rows, list(part.arms), part.rates, ngrams) for name, part in PARTS.items()}
    if rows:
        write(sweeps, rows, f"`{size}`, text: {text.name}.", options.out)
    if not whole:
        print("Some runs are still to do: give the same command again.")
    return sweeps


if __name__ == "__main__":
    main()
