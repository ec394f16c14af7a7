"""Sweep learning rates: a small ViT on images of digits at a grid of rates, with each way to bound attention logits.

    python recipes/benchmarks/vision.py

A ViT of 4 layers, 64 wide, with 2 heads, trains from random weights on scikit-learn's 1,797 images of handwritten
digits (8×8 pixels, in patches of 2×2): 300 steps of 64 images, Adam with betas 0.9 and 0.95, without weight decay,
gradient clipping or dropout, 25 steps of warm-up, then a constant rate. The runs of a seed see the same batches. The
360 images that are held out are the same for all runs.

The rules are those of `stability.py`, and were fixed with rates, arms and seeds before the runs, after five single runs
of this model (`baseline` at 0.002, 0.016 and 0.064, `qk_norm` at 0.002 and 0.016, seed 0):

- A run has diverged if a loss is not finite, if its held-out loss is above that of an even guess, or if it is more than
  a margin above a reference. The margins are 0.1, 0.2, 0.3 and 0.5 nats per image; the references are the arm's own
  best (the smallest mean over the seeds at any rate), the baseline's best, and each seed's own best.
- A rate is stable if no seed diverges at it, or at any rate from the arm's best one up to it.
- The sensitivity to the learning rate is the mean over the rates of min(loss, loss at initialisation), less the best
  loss (Wortsman et al. 2023, arXiv 2309.14322), for each seed.
- A run has learned more than the sum of its pixels if it ends under the loss of a linear classifier: softmax regression
  on the pixels, with the weight decay of 10⁻², 10⁻³ or 10⁻⁴ that is best on the held-out images.

An arm counts with the seeds that have all rates; a number without ± is of one seed. Arms with more seeds are judged
more strictly, because any seed that diverges counts. An interrupted sweep continues where it stopped, and no run starts
after `--minutes`. Needs scikit-learn. Writes a page, its runs and a plot.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import study
import torch
import torch.nn.functional as F
from arms import ARMS
from markdown_table import table
from run_log import Row, Runs, provenance, thinned
from stability_page import factor_cell, loss_cell, mean_cell, over_rates, rate_cell, stable_rates
from stability_table import Sweep
from stability_verdicts import verdicts
from sweep import Batch, held_out_loss, train
from sweep_plots import plot_losses
from torch import Tensor
from torch.optim import Adam
from transformers import HfArgumentParser, PreTrainedModel, ViTConfig, ViTForImageClassification

from hf_qknorm import Scheme, logit_statistics, patch_model

CHOSEN = ("baseline", "soft_cap", "qk_norm", "qk_norm_cap")
RATES = tuple(5e-4 * 2**i for i in range(7))
SIMPLE = ("even guess", "linear classifier")
DIGITS, HELD_OUT = 10, 360  # kinds of images; images that are held out
DECAYS = (1e-2, 1e-3, 1e-4)  # of the linear classifier
POINTS = 40  # of the training loss that are kept


@dataclass(frozen=True)
class Size:
    """A ViT's shape and training."""

    layers: int = 4
    heads: int = 2
    width: int = 64
    batch: int = 64
    steps: int = 300
    warmup: int = 25

    def build(self, scheme: str | Scheme) -> PreTrainedModel:
        """Return a patched ViT with random weights, in training mode."""
        config = ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            num_labels=DIGITS,
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        logging.getLogger("hf_qknorm").setLevel(logging.ERROR)
        return patch_model(ViTForImageClassification(config), scheme).train()


SIZES = {"quick": Size(layers=1, width=8, batch=4, steps=6, warmup=2), "full": Size()}


@dataclass
class Options:
    """The options of the sweep."""

    size: str = field(default="full", metadata={"choices": list(SIZES)})
    rates: list[float] = field(default_factory=lambda: list(RATES))
    seeds: int = 3
    jobs: int = 1
    minutes: float = math.inf
    out: Path = Path("recipes/results/vision")


class Images:
    """The images of digits `[N, 1, 8, 8]`, from −1 to 1, and their labels `[N]`; the last 360 are held out."""

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError("the images come with scikit-learn: pip install scikit-learn") from error
        found = load_digits()
        order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
        self.pixels = (torch.tensor(found.images, dtype=torch.float32)[order, None] / 8) - 1
        self.labels = torch.tensor(found.target)[order]

    def batches(self, size: Size, seed: int) -> list[Batch]:
        """A batch of random images that are not held out for every step."""
        generator = torch.Generator().manual_seed(100 + seed)
        count = len(self.labels) - HELD_OUT
        return [self._batch(torch.randint(count, (size.batch,), generator=generator)) for _ in range(size.steps)]

    def judging(self) -> Batch:
        """The images that are held out, as one batch."""
        return self._batch(torch.arange(len(self.labels) - HELD_OUT, len(self.labels)))

    def _batch(self, rows: Tensor) -> Batch:
        return {"pixel_values": self.pixels[rows], "labels": self.labels[rows]}

    def linear_loss(self) -> float:
        """The held-out loss of softmax regression on the pixels."""
        x, y = self.pixels.flatten(1).double(), self.labels
        return min(_softmax_regression(x[:-HELD_OUT], y[:-HELD_OUT], x[-HELD_OUT:], y[-HELD_OUT:], w) for w in DECAYS)


def _softmax_regression(x: Tensor, y: Tensor, held_out: Tensor, labels: Tensor, decay: float) -> float:
    """The held-out loss of a linear classifier, fitted with a penalty of `decay`/2 times its squared weights."""
    weight, bias = (torch.zeros(*shape, DIGITS, dtype=x.dtype, requires_grad=True) for shape in ((x.shape[1],), ()))
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight + bias, y) + decay / 2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return float(F.cross_entropy(held_out @ weight + bias, labels))


@cache
def images() -> Images:
    return Images()


@torch.no_grad()
def judged(model: Any, batch: Any) -> dict[str, float]:
    """The share of images that are classified right; the largest |logit|, and the smallest share of even entropy."""
    model.eval()
    with logit_statistics(model) as seen:
        right = model(**batch).logits.argmax(-1) == batch["labels"]
    logit = max(float(layer.max_logit.max()) for layer in seen.values())
    lowest = min(float((layer.entropy / layer.even).min()) for layer in seen.values())
    return {"right": float(right.float().mean()), "logit": float(f"{logit:.4g}"), "lowest": float(f"{lowest:.4g}")}


def run_one(settings: Row) -> Row:
    """Train one model; return its held-out loss, its training losses, and its attention at the end."""
    size, arm = Size(**{each.name: settings[each.name] for each in fields(Size)}), ARMS[settings["arm"]]
    torch.manual_seed(settings["seed"])
    model = size.build(arm.scheme)
    optimizer = Adam(model.parameters(), lr=settings["rate"], betas=(0.9, 0.95), fused=True)
    judging = images().judging()
    initial = held_out_loss(model, [judging])
    losses = train(model, images().batches(size, settings["seed"]), optimizer, warmup=size.warmup)
    held_out = held_out_loss(model, [judging]) if math.isfinite(losses[-1]) else math.nan
    ends = {"held_out": round(held_out, 5), "initial": round(initial, 5)}
    seen = {name: [value] for name, value in judged(model, judging).items()}
    return {**ends, "losses": thinned(losses, POINTS), "seen": seen}


def wanted(options: Options) -> list[Row]:
    """The settings of all runs, in their order: seeds are completed one by one."""
    size, grid = asdict(SIZES[options.size]), [(arm, rate) for arm in CHOSEN for rate in options.rates]
    return [{"arm": arm, "rate": rate, "seed": seed, **size} for seed in range(options.seeds) for arm, rate in grid]


def summary(found: Sweep) -> list[str]:
    """The table of all arms, as in `stability.py`."""
    head = ["arm", "seeds", "best loss, at rate", "sensitivity", "all seeds under the linear classifier up to"]
    rows = []
    for arm, grid in found.grids.items():
        best = grid.best[1]
        under = rate_cell(grid.stable(found.trigram), top=found.rates[-1])
        factor = "1" if arm == "baseline" else factor_cell(found, arm)
        cells = [f"{mean_cell(grid.losses(best))}, {best:g}", mean_cell(grid.sensitivities()), under, factor]
        rows.append([arm, str(grid.seeds), *cells])
    return table([*head, "largest stable rate, times the baseline's"], rows)


def page(found: Sweep, size: Size, rows: list[Row], plot: Path) -> str:
    """Format the results as Markdown."""
    lines = study.opening("The largest stable learning rate of a small ViT", __doc__, f"`{size}`; {provenance(rows)}")
    lines += [f"An even guess has a loss of {found.bigram:.3f}, the linear classifier of {found.trigram:.3f}.", ""]
    lines += [f"![Held-out loss over the learning rate]({plot.name})", "", *summary(found), *verdicts(found)]
    lines += stable_rates(found)
    lines += ["Held-out loss: mean and standard deviation over the seeds, with the number of seeds above an even guess "
              "(b) or else above the linear classifier (t):", ""]  # fmt: skip
    lines += over_rates(found, loss_cell(found), grams=True)
    lines += ["Images that are classified right, in per cent; largest |logit| before any cap; smallest share of "
              "uniform attention's entropy that a head has; means of the seeds:", ""]  # fmt: skip

    def seen(runs: list[Row]) -> str:
        right, logit, lowest = (
            sum(run["seen"][x][-1] for run in runs) / len(runs) for x in ("right", "logit", "lowest")
        )
        return f"{100 * right:.1f}; {logit:.3g}; {lowest:.2g}"

    return "\n".join([*lines, *over_rates(found, seen)]).rstrip("\n") + "\n"


def main(command: list[str] | None = None) -> Sweep:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses(command)
    torch.set_num_threads(1)
    runs, asked = Runs(options.out.with_suffix(".jsonl")), wanted(options)
    runs.run_all(asked, run_one, options.jobs, options.minutes)
    rows = [row for row in runs.rows if row["settings"] in asked]
    simple = math.log(DIGITS), images().linear_loss()
    found = Sweep.of(rows, list(CHOSEN), tuple(options.rates), simple, SIMPLE)
    plot = options.out.with_suffix(".png")
    lines = dict(zip(SIMPLE, simple, strict=True))
    plot_losses({arm: grid.runs for arm, grid in found.grids.items()}, lines, plot, each="image")
    study.publish(page(found, SIZES[options.size], rows, plot), options.out)
    return found


if __name__ == "__main__":
    main()
