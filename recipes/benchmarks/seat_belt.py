"""Sharp norms as a seat belt: added to a trained model, trained with, opened as the rate falls, and removed.

    python recipes/benchmarks/seat_belt.py --checkpoint llama-shakespeare --text wikitext2-valid.txt

The model is converted to sharp norms of queries and keys (sharpness 8, knee 3), and trained on for 300 steps of 4×128
tokens of the first nine tenths of the text: AdamW with weight decay 0.1 on matrices, gradients clipped at 1, a warm-up
of 30 steps and a cosine to a tenth. The held-out loss is over 16 batches of 8×128 tokens of the last tenth. Only the
batches depend on the seed.

- "unpatched": the model without norms.
- "kept": the knee stays to the end.
- "KneeSchedule": `KneeSchedule(0.25, math.inf, after=0.75)` opens the knee in the last quarter.

At the end the norms are removed: `set_knee(model, inf)` and `remove_norms`. The cost of a removal is the loss behind it
less the loss before it. The rates are the best one of the unpatched model, three and ten times that. An arm keeps the
promise if its mean cost is at most 0.005 nats at every rate. An interrupted study continues where it stopped. Writes a
page and its runs; prints Markdown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from page import opening, publish, table
from paired import Difference
from run_log import Row, parse, provenance
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import KneeSchedule, Scheme, calibrate, logit_statistics, patch_model, remove_norms, set_knee
from hf_qknorm.measure.text import load_text, sample_batches, tokenize
from hf_qknorm.small_model import mean_loss, train

ARMS = ("unpatched", "kept", "KneeSchedule")
OPENING = KneeSchedule(0.25, math.inf, after=0.75)
KNEE, SCHEME = 2.0**1.5, Scheme(q="rms", k="rms")
STEPS, WARMUP, BATCH, LENGTH = 300, 30, 4, 128
LOOK = 25  # steps between two measurements of the largest logit
COST = 0.005  # nats that a removal may cost
Results = dict[tuple[float, str], list[Row]]  # by rate and arm, a row for each seed


@dataclass(kw_only=True)
class Options:
    """The options of the study: the model, the text to learn, and the page without its ending."""

    checkpoint: str
    text: str
    size: str = field(default="full", metadata={"choices": ["quick", "full"]})
    seeds: int = 3
    rates: list[float] = field(default_factory=lambda: [1e-3, 3e-3, 1e-2])
    out: Path = Path("recipes/results/data/seat_belt_v1")


class Texts:
    """The tokens of the text, and the batches that judge."""

    def __init__(self, options: Options) -> None:
        self.checkpoint, self.steps = options.checkpoint, STEPS if options.size == "full" else 3
        ids = tokenize(AutoTokenizer.from_pretrained(options.checkpoint), load_text(options.text))
        cut = int(len(ids) * 0.9)
        self.seen = ids[:cut]
        self.judging = sample_batches(ids[cut:], 16 if options.size == "full" else 1, 8, LENGTH, seed=0)

    def batches(self, steps: int, seed: int) -> list[Tensor]:
        return sample_batches(self.seen, steps, BATCH, LENGTH, seed)


def run_one(texts: Texts, arm: str, rate: float, seed: int) -> Row:
    """Train the model on; return its losses with and without norms, and its largest |logit|, on the way and at last."""
    model: Any = AutoModelForCausalLM.from_pretrained(texts.checkpoint)
    model.eval()
    if arm != "unpatched":
        data = [{"input_ids": x} for x in texts.batches(24, seed=1)]
        calibrate(patch_model(model, SCHEME), data, knee=KNEE, sharpness=8)
    logits = []

    def each_step(step: int) -> None:
        if arm == "KneeSchedule" and step < texts.steps:
            set_knee(model, OPENING.at(step, texts.steps, KNEE))
        if step % LOOK == 0:
            logits.append(largest_logit(model, texts.judging[:1]))

    train(
        model,
        texts.batches(texts.steps, 100 + seed),
        rate=rate,
        warmup=WARMUP,
        decay=True,
        each_step=each_step,
    )
    before = mean_loss(model, texts.judging)
    after = before
    if arm != "unpatched":
        set_knee(model, math.inf)
        model = remove_norms(model)
        after = mean_loss(model, texts.judging)
    end = largest_logit(model, texts.judging)
    return {"before": round(before, 5), "after": round(after, 5), "way": round(max(logits), 1), "logit": round(end, 1)}


@torch.no_grad()
def largest_logit(model: Any, batches: list[Tensor]) -> float:
    """The largest |logit| of any layer over the batches."""
    with logit_statistics(model.eval()) as seen:
        mean_loss(model, batches)
    model.train()
    return max(float(layer.max_logit.max()) for layer in seen.values())


def page(options: Options, results: Results, made: str) -> list[str]:
    """The study as Markdown."""
    rows = []
    for (rate, arm), found in results.items():
        after, before = ([run[key] for run in found] for key in ("after", "before"))
        others = [run["after"] for run in results[rate, "unpatched"]]
        each = ", ".join(f"{end:.4f}" for end in after)
        cost = "" if arm == "unpatched" else f"{Difference.of(after, before):.4f}"
        gained = "" if arm == "unpatched" else f"{Difference.of(after, others):.4f}"
        way, logit = (max(run[key] for run in found) for key in ("way", "logit"))
        rows.append([f"{rate:g}", arm, each, cost, gained, f"{way:g}", f"{logit:g}"])
    head = ["rate", "arm", "held-out loss, norms removed (of each seed)", "cost of the removal", "less unpatched"]
    lines = opening("Sharp norms as a seat belt", __doc__, made)
    lines += table([*head, "largest \\|logit\\| on the way", "and at the end"], rows, align="rlrrrrr")
    return [*lines, *verdicts(options, results)]


def verdicts(options: Options, results: Results) -> list[str]:
    """The rule's outcome, as lines of a Markdown list."""
    lines = []
    for arm in ARMS[1:]:
        runs = (results[rate, arm] for rate in options.rates)
        cost = max(Difference.of([run["after"] for run in rows], [run["before"] for run in rows]).mean for rows in runs)
        lines.append(f"- {arm}: {'keeps' if cost <= COST else 'does not keep'} the promise (worst cost {cost:.4f}).")
    return lines


def main(command: list[str] | None = None) -> str:
    options, runs = parse(Options, command)
    texts, results = Texts(options), {(rate, arm): [] for rate in options.rates for arm in ARMS}
    settings = {"checkpoint": Path(options.checkpoint).name, "size": options.size}
    for seed in range(options.seeds):
        for (rate, arm), rows in results.items():
            asked = {**settings, "arm": arm, "rate": rate, "seed": seed}
            rows.append(runs.get(asked, partial(run_one, texts, arm, rate, seed)))
            print(f"rate {rate:g}, {arm}, seed {seed}: {rows[-1]}", flush=True)
    return publish(page(options, results, f"{options.seeds} seeds; {provenance(runs.used)}"), options.out)


if __name__ == "__main__":
    main()
