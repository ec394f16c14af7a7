"""Sweep learning rates: a small GPT-2 at a grid of rates, with each way to bound its attention logits.

    python recipes/benchmarks/stability.py --text tinyshakespeare.txt

After Rybakov et al. 2024 (arXiv 2410.16682): model, data and rates are the same for every arm, and the result is the
largest rate that does not diverge. The optimizer is Adam without weight decay or gradient clipping, with a short warm-
up and then a constant rate: nothing else stabilises a run. The rule was fixed before the sweep: a run has diverged if a
loss is not finite, or if its held-out loss ends more than 0.3 nats above the baseline's best over all rates (the mean
over the seeds). A rate is stable if no seed diverges at it or at any smaller one.

By default the text is the source code of Python's library, for about half an hour on one core; `--size gpu --device
cuda` is GPT-2 small. An interrupted sweep continues where it stopped. Writes a page, its runs and two plots.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from arms import ARMS, Arm
from run_log import Row, Runs, provenance, thinned
from stability_table import MARGIN, Sweep, page
from sweep import Characters, Size, held_out_loss, train
from sweep_plots import plot_logits, plot_losses
from torch.optim import Adam
from transformers import HfArgumentParser

from hf_qknorm import logit_statistics
from hf_qknorm.files.atomic_io import replace_text

LOOKS = 20  # times that a run's largest logit is noted
POINTS = 30  # of its training loss that are kept

SIZES = {
    "quick": Size(layers=1, heads=2, width=16, length=16, batch=4, steps=6, warmup=2, judge=1),
    "cpu": Size(layers=2, heads=4, width=64, length=64, batch=16, steps=300),
    "gpu": Size(layers=12, heads=12, width=768, length=512, batch=64, steps=3000, warmup=100),
}


@dataclass
class Options:
    """The options of the sweep."""

    text: str | None = None
    size: str = field(default="cpu", metadata={"choices": list(SIZES)})
    rates: list[float] = field(default_factory=lambda: [2e-3 * 2**i for i in range(8)])
    seeds: int = 3
    arms: list[str] = field(default_factory=lambda: list(ARMS))
    device: str = "cpu"
    threads: int = 1
    out: Path = Path("recipes/results/stability")

    def __post_init__(self) -> None:
        if unknown := set(self.arms) - set(ARMS):
            raise ValueError(f"unknown arms {sorted(unknown)}: expected some of {', '.join(ARMS)}")
        if "baseline" not in self.arms:
            raise ValueError(f"arms {self.arms}: expected baseline among them, which the others are held against")
        self.rates = sorted(self.rates)


def run_one(arm: Arm, size: Size, text: Characters, rate: float, seed: int, device: str) -> Row:
    """Train one model; return its losses and its largest |logit| before any cap, over time."""
    torch.manual_seed(seed)
    model = size.build(text.vocabulary, arm.scheme).to(device)
    optimizer = arm.around(model, Adam(model.parameters(), lr=rate, betas=(0.9, 0.95)))
    judging, logits = text.judging(size), []

    def look(step: int) -> None:
        if step % max(size.steps // LOOKS, 1) == 0:
            with torch.no_grad(), logit_statistics(model) as seen:
                held_out_loss(model, judging[:1])
            logits.append((step, round(max(float(layer.max_logit.max()) for layer in seen.values()), 2)))

    losses = train(model, text.training(size, seed), optimizer, warmup=size.warmup, after_step=look)
    held_out = held_out_loss(model, judging) if math.isfinite(losses[-1]) else math.nan
    return {"losses": thinned(losses, POINTS), "held_out": round(held_out, 5), "logits": logits}


def sweep(options: Options, runs: Runs) -> Sweep:
    """Return all runs, earlier ones included; seeds are completed one by one, so that a part of the sweep is usable."""
    size, text = SIZES[options.size], Characters(options.text)
    results: dict[str, dict[float, list[Row]]] = {arm: {rate: [] for rate in options.rates} for arm in options.arms}
    for seed in range(options.seeds):
        for rate in options.rates:
            for arm in options.arms:
                settings = {"arm": arm, "rate": rate, "seed": seed, "text": text.name, **asdict(size)}
                run = runs.get(settings, lambda: run_one(ARMS[arm], size, text, rate, seed, options.device))  # noqa: B023
                results[arm][rate].append(run)
                print(f"seed {seed}, rate {rate:g}, {arm}: {run['held_out']:.3f}", flush=True)
    return Sweep(results, options.rates)


def main(arguments: list[str] | None = None) -> Sweep:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses(arguments)
    torch.set_num_threads(options.threads)
    runs = Runs(options.out.with_suffix(".jsonl"))
    found = sweep(options, runs)
    rule = (__doc__ or "").split("\n\n")[2].strip()
    settings = f"`{SIZES[options.size]}`, seeds: {options.seeds}, text: {runs.used[0]['settings']['text']}."
    plots = [options.out.with_name(f"{options.out.name}-{what}.png") for what in ("loss", "logits")]
    plot_losses(found.results, found.best + MARGIN, plots[0])
    plot_logits(found.results, plots[1])
    text = page(found, [rule, settings, provenance(runs.used)], plots)
    replace_text(options.out.with_suffix(".md"), text)
    print(text)
    return found


if __name__ == "__main__":
    main()
