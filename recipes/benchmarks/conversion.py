"""Measure what a conversion keeps of a trained model: by knee and method, through further training, and at which cost.

    python recipes/benchmarks/conversion.py --checkpoint ../shared/checkpoints/llama-shakespeare \
        --text ../shared/data/tinyshakespeare.txt --part methods

Parts: methods, training, cost, fold, blend. `conversion_texts.py` has the parts on texts and positions,
`conversion_tried.py` and `conversion_knees.py` further experiments. Calibration draws batches of 8×256 tokens from the
first nine tenths of the text. Losses are over batches of the last tenth: 12 for knees and texts, 6 for training
and folds. The share of the jump removed is (ones − method) / (ones − base). Prints Markdown; finished runs are stored
in `--runs`.

Targets for the default call `calibrate(model, data)`: at least 98.5 % of the jump removed; 120 steps at 3e-4 end within
0.005 nats of the unpatched model; a price of at most two passes over the text.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from run_log import Row, Runs, provenance
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import BlendSchedule, Scheme, calibrate, patch_model, set_blend
from hf_qknorm.calibration.knees import KNEES, tried_knees
from hf_qknorm.demo.training import mean_loss, train
from hf_qknorm.measure.text import load_text, sample_batches, tokenize

BATCH, LENGTH = 8, 256
BATCHES = 128  # of a calibration without a knee
TEXT = 32  # batches of the default call
SEEDS = (1, 2, 3)  # of the calibration's text, or of the training's
QK = {"q": "auto", "k": "auto"}
SHARED = Scheme(**QK)
BLENDED, RATE = 120, 3e-4


class Story:
    """A trained model, its text in calibration, training and held-out batches, and its loss."""

    def __init__(self, checkpoint: str, text: str, runs: Path, other: list[str] | None = None) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.seen, self.unseen = self.cut(load_text(text))
        self.name, self.text, self.other, self.runs = Path(checkpoint).name, text, other or [], Runs(runs)
        self.base = AutoModelForCausalLM.from_pretrained(checkpoint, use_safetensors=True).eval()
        self.calibration = self.batches(1)
        self.training = self.batches(2, BLENDED)
        self.held_out = sample_batches(self.unseen, 6, BATCH, LENGTH, seed=0)
        self.judged = sample_batches(self.unseen, 12, BATCH, LENGTH, seed=0)
        self.loss = mean_loss(self.base, self.held_out)

    def cut(self, characters: str) -> tuple[Tensor, Tensor]:
        """Return the tokens of the first nine tenths, and of the last."""
        cut = int(len(characters) * 0.9)
        seen, unseen = (tokenize(self.tokenizer, part) for part in (characters[:cut], characters[cut:]))
        return seen, unseen

    def batches(self, seed: int, count: int = BATCHES, length: int = LENGTH) -> list[Tensor]:
        return sample_batches(self.seen, count, BATCH, length, seed=seed)

    def patched(self, scheme: Scheme | str, method: str = "ones") -> Any:
        """Return a model with gains from a method, without a knee."""
        model = patch_model(copy.deepcopy(self.base), scheme)
        if method != "ones":
            calibrate(model, self.calibration, method=method, max_tokens=2**20)
        return model.eval()

    def converted(self, batches: list[Tensor], **options: Any) -> Any:
        """Return a model after `calibrate(model, batches)`."""
        model = patch_model(copy.deepcopy(self.base), SHARED)
        calibrate(model, batches, **{"max_tokens": 2**20, **options})
        return model.eval()

    def get(self, part: str, run: Callable[[], Row], **settings: Any) -> Row:
        return self.runs.get({"model": self.name, "part": part, **settings}, run)

    def row(self, label: str, scheme: Scheme | str, model: Any, fresh: float | None = None) -> None:
        """Print a line: a label, the loss with fresh gains, the loss of this model, and the share of the jump
        removed.
        """
        fresh = mean_loss(self.patched(scheme), self.held_out) if fresh is None else fresh
        loss = mean_loss(model, self.held_out)
        removed = (fresh - loss) / (fresh - self.loss)
        print(f"| {label} | {fresh:.3f} | {loss:.4f} | {removed:.1%} |", flush=True)


def head(story: Story, first: str) -> None:
    print(f"\nbase {story.loss:.4f}\n\n| {first} | ones | loss | jump removed |\n|---|---:|---:|---:|")


def spread(values: list[float], form: str = "+.4f") -> str:
    """Format a mean and a range."""
    if len(values) == 1:
        return format(values[0], form)
    mean, least, most = (format(f(values), form) for f in (statistics.fmean, min, max))
    return f"{mean} ({least} to {most})"


def ends(story: Story) -> tuple[float, float]:
    """Return the losses unpatched and with fresh gains."""

    def run() -> Row:
        return {"base": mean_loss(story.base, story.judged), "ones": mean_loss(story.patched(SHARED), story.judged)}

    row = story.get("ends", run)
    return row["base"], row["ones"]


def methods(story: Story) -> None:
    """Measure the default call and each knee."""
    base, ones = ends(story)

    def swept() -> Row:
        fitted, judged = ([{"input_ids": batch} for batch in part] for part in (story.batches(1, TEXT), story.judged))
        with tried_knees(story.patched(SHARED), fitted, judged) as predicted:
            return {f"{knee:g}": predicted(knee).loss for knee in KNEES}

    defaults = default_calls(story)
    knees = story.get("methods", swept, call="knees", seed=1)
    rows = {f"`calibrate(model, data)`: knee {chosen(defaults)}": [row["loss"] for row in defaults]}
    rows |= {f"knee {knee:g}, one text": [knees[f"{knee:g}"]] for knee in KNEES}
    print(f"\n{story.name}: unpatched {base:.4f}, fresh gains {ones:.4f}\n")
    print("| conversion | rise | jump removed |\n|---|---:|---:|")
    for label, losses in rows.items():
        removed = [(ones - loss) / (ones - base) for loss in losses]
        print(f"| {label} | {spread([loss - base for loss in losses])} | {spread(removed, '.2%')} |")


def default_calls(story: Story) -> list[Row]:
    """Measure the default call on three texts: its knee, its loss, and its price in passes and CPU seconds."""

    @torch.no_grad()
    def run(seed: int) -> Row:
        batches, seen = story.batches(seed, TEXT), 0
        start = time.process_time()
        for batch in batches:
            story.base(batch, use_cache=False)
        plain = time.process_time() - start
        model = patch_model(copy.deepcopy(story.base), SHARED)

        def count(module: Any, args: Any, kwargs: Any) -> None:
            nonlocal seen
            seen += (args[0] if args else kwargs["input_ids"]).numel()

        hook = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
        start = time.process_time()
        calibrate(model, batches)
        seconds = time.process_time() - start
        hook.remove()
        passes = seen / sum(batch.numel() for batch in batches)
        loss = mean_loss(model.eval(), story.judged)
        return {"knee": model.config.scheme.knee, "loss": loss, "passes": passes, "pass": plain, "seconds": seconds}

    return [
        story.get("methods", partial(run, seed), call="default", tokens=TEXT * BATCH * LENGTH, seed=seed)
        for seed in SEEDS
    ]


def chosen(rows: list[Row]) -> str:
    return ", ".join(f"{knee:g}" for knee in sorted({row["knee"] for row in rows}))


def training(story: Story) -> None:
    """Measure further training: unpatched, from the default call, and from fresh gains."""
    starts: dict[str, Callable[[], Any]] = {
        "unpatched": lambda: story.patched("none"),
        "`calibrate(model, data)`": lambda: story.converted(story.batches(1, TEXT)),
        "fresh gains": lambda: story.patched(SHARED),
    }

    def losses_of(start: Callable[[], Any], seed: int) -> Row:
        return {"losses": continued(story, start(), None, seed)}

    rows: dict[str, list[list[float]]] = {}
    baseline = "fresh gains"
    compared = [(label, seed) for seed in SEEDS for label in starts if label != baseline]
    for label, seed in [*compared, (baseline, SEEDS[0])]:
        story.training = story.batches(100 + seed, BLENDED)
        row = story.get("training", partial(losses_of, starts[label], seed), start=label, seed=seed)
        rows.setdefault(label, []).append(row["losses"])
    print(f"\n{story.name}, {BLENDED} steps at {RATE:g}\n\n| from | before | after | end, over the unpatched model's |")
    print("|---|---:|---:|---:|")
    for label, runs in rows.items():
        over = [own[-1] - other[-1] for own, other in zip(runs, rows["unpatched"], strict=False)]
        first, last = (statistics.fmean(losses[i] for losses in runs) for i in (0, -1))
        print(f"| {label} | {first:.4f} | {last:.4f} | {spread(over)} |")


def cost(story: Story) -> None:
    """Measure the price of the default call, in passes over its text and in their CPU time."""
    rows = default_calls(story)
    passes, ratios = [row["passes"] for row in rows], [row["seconds"] / row["pass"] for row in rows]
    print(f"\n{story.name}: {spread(passes, '.2f')} passes over the text, {spread(ratios, '.2f')} times a pass's time")


def fold(story: Story) -> None:
    """Measure qkv_norm, which folds the norm in front of attention away."""
    head(story, "`qkv_norm`, method")
    scheme = Scheme(q="auto", k="auto", v="auto", pre_norm=False)
    fresh = mean_loss(story.patched(scheme), story.held_out)
    story.row("folded, `moments`", scheme, story.patched(scheme, "moments"), fresh)
    kept = Scheme(q="auto", k="auto", v="auto")
    story.row("the norm kept, `moments`", kept, story.patched(kept, "moments"), fresh)


def blend(story: Story) -> None:
    """Measure further training from an exact start, beside the unpatched model."""
    steps = range(0, BLENDED + 1, 20)
    print(f"\n| held-out loss after step | {' | '.join(map(str, steps))} |\n|---|{'---:|' * len(steps)}")
    control = continued(story, story.patched("none"), None)
    runs = {"unpatched control": control}
    for scheme, method in (("qk_norm", "ones"), ("qk_norm", "moments"), ("qk_norm_cap", "moments")):
        model, schedule = story.patched(scheme, method), BlendSchedule(share=0.5)
        runs[f"`{scheme}`, blend over 60 steps, gains from `{method}`"] = continued(story, model, schedule)
    runs["`qk_norm`, no blend, gains from `moments`"] = continued(story, story.patched("qk_norm", "moments"), None)
    for label, losses in runs.items():
        worst = max(loss - other for loss, other in zip(losses, control, strict=True))
        note = "" if losses is control else f" (end {losses[-1] - control[-1]:+.4f}, worst {worst:+.4f})"
        print(f"| {label}{note} | {' | '.join(f'{loss:.4f}' for loss in losses)} |", flush=True)


def continued(story: Story, model: Any, schedule: BlendSchedule | None, seed: int = 0) -> list[float]:
    """Return the held-out loss every 20 steps of training."""
    losses = []

    def each_step(step: int) -> None:
        if schedule is not None:
            set_blend(model, schedule.at(step, BLENDED))
        if step % 20 == 0:
            losses.append(mean_loss(model, story.held_out))

    torch.manual_seed(seed)
    train(model, story.training, rate=RATE, desc="continuing", each_step=each_step)
    return losses


def run(parts: list[Callable[[Story], None]], text: str | None) -> None:
    """Parse the command line of a recipe and print its parts."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--other", nargs="*", help="files of other text")
    parser.add_argument("--runs", type=Path, default=Path(__file__).parents[1] / "results" / "conversion.jsonl")
    named = {part.__name__: part for part in parts}
    parser.add_argument("--part", choices=named, required=True)
    options = parser.parse_args()
    logging.getLogger("hf_qknorm").setLevel(logging.ERROR)
    story = Story(options.checkpoint, options.text, options.runs, options.other)
    named[options.part](story)
    if story.runs.used:
        print(f"\n{provenance(story.runs.used)}")


if __name__ == "__main__":
    run([methods, training, cost, fold, blend], __doc__)
