"""Convert a masked language model, train it on with other text at several rates, and compare it with the unpatched one.

    python recipes/benchmarks/masked_lm.py --known tinyshakespeare.txt --text wikitext2-valid.txt

A RoBERTa-PreLayerNorm of 2 layers, 96 wide, with 4 heads is trained first: 1,500 steps of 16×64 tokens (bytes) of the
known text, of which 10 in each sequence are masked, AdamW at 0.003 with weight decay 0.1 on matrices, gradients clipped
at 1, a warm-up of 20 steps and a cosine to a tenth, no dropout. Its positions start as sinusoids, which shortens the
time until attention is used. (A BERT of 3 layers, with its norms after attention and MLP, did not get below the loss of
the frequencies of bytes in 1,000 steps; seven runs of it were thrown away, and the model was changed.) Each run trains
it on with the other text for 150 steps in the same way, at its rate. The runs of a seed share batches and masks;
nothing else depends on the seed. The held-out loss is over the masked tokens of 16 batches of the text's last tenth.

- "unpatched": the model as it was trained.
- "fresh gains": the scheme `qk_norm` with gains 1.
- "calibrated": `calibrate` on 24 batches of the known text, with a searched knee, which stays.
- "knee lowered": the same, and `KneeSchedule` takes the knee to 0 over the first half of the run.

Fixed before the runs: an arm ends better or worse than "unpatched" at a rate if the difference of the losses, paired
over seeds, is above twice its standard error. A conversion keeps what the model knew if it costs at most 0.01 nats on
held-out batches of the known text before any training. The third seed was run after the results of two had been seen.
An interrupted comparison continues where it stopped. Writes a page and its runs; prints Markdown.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import study
import torch
from continued_run import corpus
from markdown_table import table
from paired import Difference
from run_log import Row, Runs, provenance
from sweep import Batch, held_out_loss, train
from torch import Tensor
from torch.optim import AdamW
from transformers import RobertaPreLayerNormConfig, RobertaPreLayerNormForMaskedLM

from hf_qknorm import KneeSchedule, calibrate, patch_model, set_knee
from hf_qknorm.demo.training import decay_groups
from hf_qknorm.measure.text import IGNORED, sample_batches

ARMS = ("unpatched", "fresh gains", "calibrated", "knee lowered")
KEPT = 0.01  # nats that a conversion may cost
LOWERED = 0.5  # the share of the run in which the knee falls
FLOOR = 0.1  # of the rate, at the end


@dataclass(frozen=True)
class Size:
    """The model, and the lengths of its first training (`base` steps) and of a run."""

    layers: int = 2
    width: int = 96
    heads: int = 4
    batch: int = 16
    length: int = 64
    masked: int = 10
    base: int = 1500
    base_rate: float = 3e-3
    steps: int = 150
    warmup: int = 20
    judged: int = 16
    calibrated: int = 24
    characters: int = 1_200_000


SIZES = {"quick": Size(1, 32, 2, 4, 24, masked=4, base=3, steps=4, warmup=2, judged=2, calibrated=11), "full": Size()}


@dataclass(kw_only=True)
class Options(study.Options):
    """The options of the comparison; `work` holds the weights of the first training, on the text `known`."""

    known: str
    rates: list[float] = field(default_factory=lambda: [1e-3, 1e-2, 3e-2])
    work: Path = Path("masked_lm.pt")
    out: Path = Path("recipes/results/masked_lm")


def masked(ids: Tensor, count: int, mask: int, seed: int) -> Batch:
    """A batch of token ids `[B, T]` with `count` random tokens of each sequence masked, which are its labels."""
    order = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)).argsort(1)
    hidden = torch.zeros_like(ids, dtype=torch.bool).scatter_(1, order[:, :count], True)
    return {"input_ids": ids.masked_fill(hidden, mask), "labels": ids.masked_fill(~hidden, IGNORED)}


def small_roberta(size: Size, vocabulary: int) -> RobertaPreLayerNormForMaskedLM:
    """An encoder with random weights, whose positions are sinusoids of periods from 6 to 300 tokens."""
    config = RobertaPreLayerNormConfig(
        vocab_size=vocabulary,
        pad_token_id=0,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.length + 1,  # positions count from pad_token_id + 1
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.05,
    )
    model = RobertaPreLayerNormForMaskedLM(config)
    positions: Any = model.roberta_prelayernorm.embeddings.position_embeddings.weight
    half = size.width // 2
    angles = torch.arange(len(positions))[:, None] * 50 ** (-torch.arange(half) / half)
    positions.data = 0.1 * torch.cat([angles.sin(), angles.cos()], 1)
    return model


class Trained:
    """The model that was trained on the known text, both texts, and the models that the arms start from."""

    def __init__(self, options: Options) -> None:
        self.size = size = SIZES[options.size]
        self.known, self.text = (corpus(source, None, size.characters) for source in (options.known, options.text))
        self.mask = self.known.vocabulary  # the token after those of bytes
        torch.manual_seed(0)
        self.model: Any = small_roberta(size, self.mask + 1)
        known = self.known.seen
        study.trained_once(
            self.model, options.work, lambda: fit(self.model, self.batches(known, size.base, 0), size.base_rate, size)
        )
        self.judging = self.batches(self.text.held_out, size.judged, seed=0)
        self.starts = {arm: self.start(arm) for arm in ARMS}

    def batches(self, ids: Tensor, count: int, seed: int) -> list[Batch]:
        size = self.size
        sampled = sample_batches(ids, count, size.batch, size.length, seed)
        return [masked(batch, size.masked, self.mask, 10_000 * seed + i) for i, batch in enumerate(sampled)]

    def start(self, arm: str) -> Any:
        model = copy.deepcopy(self.model)
        if arm != "unpatched":
            patch_model(model, "qk_norm")
        if arm in ("calibrated", "knee lowered"):
            calibrate(model, self.batches(self.known.seen, self.size.calibrated, seed=1))
        return model


def fit(model: Any, batches: list[Batch], rate: float, size: Size, lowered: float = 0.0) -> None:
    """Train a model on batches; with `lowered`, its knee falls to 0 over this share of the run."""
    knee = model.config.scheme.knee if lowered else 0.0

    def after_step(step: int) -> None:
        if lowered and step < len(batches):
            set_knee(model, KneeSchedule(lowered).at(step, len(batches), knee))

    optimizer = AdamW(decay_groups(model, 0.1), lr=rate, betas=(0.9, 0.95), fused=True)
    train(model.train(), batches, optimizer, warmup=size.warmup, floor=FLOOR, clip=1.0, after_step=after_step)


def run_one(trained: Trained, arm: str, rate: float, seed: int) -> Row:
    """Train one model on; return its held-out loss."""
    model = copy.deepcopy(trained.starts[arm])
    batches = trained.batches(trained.text.seen, trained.size.steps, 100 + seed)
    lowered = LOWERED if arm == "knee lowered" and model.config.scheme.knee else 0.0
    fit(model, batches, rate, trained.size, lowered)
    return {"end": round(held_out_loss(model, trained.judging), 5)}


def conversion(trained: Trained) -> list[str]:
    """The cost of the conversion before any training, as Markdown."""
    judging = trained.batches(trained.known.held_out, trained.size.judged, seed=0)
    losses = {arm: held_out_loss(trained.starts[arm], judging) for arm in ARMS[:3]}
    base, knee = losses["unpatched"], trained.starts["calibrated"].config.scheme.knee
    rows = [[arm, f"{loss:.4f}", "" if arm == "unpatched" else f"{loss - base:+.4f}"] for arm, loss in losses.items()]
    kept = losses["calibrated"] - base <= KEPT
    lines = table(["before training", "held-out loss of the known text", "cost"], rows)
    verdict = "keeps what the model knew" if kept else f"costs more than the {KEPT:g} nats of the rule"
    return [*lines, f"The search found a knee of {knee:g}. By the rule, the conversion {verdict}.", ""]


def page(trained: Trained, options: Options, results: study.Results, runs: Runs) -> str:
    """The comparison as Markdown."""
    made = f"`{trained.size}`, {options.seeds} seeds; {provenance(runs.used)}"
    lines = study.opening("A masked language model, converted and trained on", __doc__, made)
    lines += conversion(trained)
    lines += ["Held-out loss of the other text after training, and its distance from the unpatched model's:", ""]
    rows = []
    for arm in ARMS:
        cells = []
        for rate in options.rates:
            ends, base = ([run["end"] for run in results[rate, name]] for name in (arm, "unpatched"))
            apart = Difference.of(ends, base)
            mean = f"{sum(ends) / len(ends):.4f}"
            cells.append(mean if arm == "unpatched" else f"{mean} ({apart:.4f}, {apart.verdict})")
        rows.append([arm, *cells])
    lines += table(["arm", *(f"rate {rate:g}" for rate in options.rates)], rows)
    return "\n".join(lines).rstrip("\n") + "\n"


def main(command: list[str] | None = None) -> str:
    options, runs = study.parse(Options, command)
    trained = Trained(options)
    settings = {**asdict(trained.size), "known": trained.known.name, "text": trained.text.name}
    results = study.by_rate_and_arm(options, runs, ARMS, settings, partial(run_one, trained))
    return study.publish(page(trained, options, results, runs), options.out)


if __name__ == "__main__":
    main()
