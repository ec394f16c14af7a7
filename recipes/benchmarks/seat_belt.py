"""Sharp norms as a seat belt: added to a trained model, trained with, opened as the rate falls, and removed.

    python recipes/benchmarks/seat_belt.py --checkpoint llama-shakespeare --text wikitext2-valid.txt

The model is converted to sharp norms of queries and keys (sharpness 8, knee 3), and trained on for 300 steps of 4×128
tokens of the first nine tenths of the text: AdamW with weight decay 0.1 on matrices, gradients clipped at 1, a warm-up
of 30 steps and a cosine to a tenth. The held-out loss is over 16 batches of 8×128 tokens of the last tenth. Only the
batches depend on the seed.

- "unpatched": the model without norms.
- "kept": the knee stays to the end.
- "last quarter", "last half": the knee is c/(1 − u), u from 0 to 1 over that part of the run.
- "by the rate": the knee is c over the cosine's share of the rate: 10 c at the last step.
- "KneeSchedule": `KneeSchedule(0.25, math.inf, after=0.75)`, which was built after the runs of the arms above.

At the end the norms are removed: `set_knee(model, inf)` and `remove_norms`. The cost of a removal is the loss behind it
less the loss before it. Rates (the best rate of the unpatched model, three and ten times that), seeds, arms and the
rule were fixed before the runs: an opening keeps the promise if its mean cost is at most 0.005 nats at every rate. Of
those that do, the one with the lowest mean final loss at the largest rate is recommended; of openings less than two
standard errors apart, the earlier one in this list. An interrupted study continues where it stopped. Writes a page
and its runs; prints Markdown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import study
import torch
from markdown_table import table
from paired import Difference
from run_log import Row, provenance
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import KneeSchedule, Scheme, calibrate, logit_statistics, patch_model, remove_norms, set_knee
from hf_qknorm.demo.training import mean_loss, train
from hf_qknorm.measure.text import load_text, sample_batches, tokenize

OPENINGS = ("last quarter", "last half", "by the rate", "KneeSchedule")
ARMS = ("unpatched", "kept", *OPENINGS)
KNEE, SCHEME = 3.0, Scheme(q="rms", k="rms", sharpness=8)
STEPS, WARMUP, BATCH, LENGTH = 300, 30, 4, 128
LOOK = 25  # steps between two measurements of the largest logit
COST = 0.005  # nats that a removal may cost


@dataclass(kw_only=True)
class Options(study.Options):
    """The options of the study."""

    checkpoint: str
    rates: list[float] = field(default_factory=lambda: [1e-3, 3e-3, 1e-2])
    out: Path = Path("recipes/results/seat_belt")


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


def opened(arm: str, step: int, steps: int) -> float:
    """The knee before a step of a run; the rate is that of `hf_qknorm.demo.training.train`."""
    if arm == "KneeSchedule":
        return KneeSchedule(0.25, math.inf, after=0.75).at(step, steps, KNEE)
    if arm == "by the rate":
        return KNEE / (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
    start = {"last quarter": 0.75, "last half": 0.5}.get(arm, 1.0) * steps
    return KNEE if step <= start else KNEE / max(1 - (step - start) / (steps - start), 2.0**-10)


def run_one(texts: Texts, arm: str, rate: float, seed: int) -> Row:
    """Train the model on; return its losses with and without norms, and its largest |logit|, on the way and at last."""
    model: Any = AutoModelForCausalLM.from_pretrained(texts.checkpoint)
    model.eval()
    if arm != "unpatched":
        calibrate(patch_model(model, SCHEME), [{"input_ids": x} for x in texts.batches(24, seed=1)], knee=KNEE)
    logits = []

    def each_step(step: int) -> None:
        if arm in OPENINGS and step < texts.steps:
            set_knee(model, opened(arm, step, texts.steps))
        if step % LOOK == 0:
            logits.append(largest_logit(model, texts.judging[:1]))

    train(
        model,
        texts.batches(texts.steps, 100 + seed),
        rate=rate,
        warmup=WARMUP,
        decay=True,
        desc=None,
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


def page(options: Options, results: study.Results, made: str) -> str:
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
    lines = study.opening("Sharp norms as a seat belt", __doc__, made)
    lines += table([*head, "largest \\|logit\\| on the way", "and at the end"], rows, align="rlrrrrr")
    return "\n".join([*lines, *verdicts(options, results)]) + "\n"


def verdicts(options: Options, results: study.Results) -> list[str]:
    """The rule's outcome, as lines of a Markdown list."""
    lines, kept = [], []
    for arm in ARMS[1:]:
        costs = [
            Difference.of([r["after"] for r in results[rate, arm]], [r["before"] for r in results[rate, arm]]).mean
            for rate in options.rates
        ]
        holds = max(costs) <= COST
        lines.append(f"- {arm}: {'keeps' if holds else 'does not keep'} the promise (worst cost {max(costs):.4f}).")
        kept += [arm] if holds and arm in OPENINGS else []
    ends = {arm: [run["after"] for run in results[max(options.rates), arm]] for arm in kept}
    best = min(kept, key=lambda arm: sum(ends[arm]), default=None)
    if best is None:
        return [*lines, "- No opening is recommended."]
    level = [arm for arm in kept if arm == best or Difference.of(ends[arm], ends[best]).verdict == "level"]
    return [*lines, f'- By the rule, "{level[0]}" is recommended.']


def main(command: list[str] | None = None) -> str:
    options, runs = study.parse(Options, command)
    texts = Texts(options)
    settings = {"checkpoint": Path(options.checkpoint).name, "size": options.size}
    results = study.by_rate_and_arm(options, runs, ARMS, settings, partial(run_one, texts))
    written = page(options, results, f"{options.seeds} seeds; {provenance(runs.used)}")
    return study.publish(written, options.out)


if __name__ == "__main__":
    main()
