"""What a conversion keeps of a trained model: methods, blending, folding, and what a fit costs.

    python recipes/conversion.py --checkpoint ../shared/checkpoints/llama-shakespeare \\
        --text ../shared/data/tinyshakespeare.txt --part methods

Parts: methods, blend, fold, cost; `conversion_tried.py` has what else was tried. Calibration draws batches of 8×256
tokens from the first nine tenths of the text; losses are over six batches of the last tenth. A jump removed is
(ones − method) / (ones − base). Prints Markdown.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import BlendSchedule, Scheme, calibrate, patch_model, set_blend
from hf_qknorm.convert import fit
from hf_qknorm.convert.calibrate import METHODS
from hf_qknorm.convert.moments import moments, norm_sizes
from hf_qknorm.convert.text import load_text, sample_batches, tokenize
from hf_qknorm.demo.training import mean_loss, train

BATCH, LENGTH = 8, 256
FITTED = 128  # 8 judge, 120 are fitted to
QK = {"q": "auto", "k": "auto"}
SHARED, PER_HEAD = Scheme(**QK), Scheme(**QK, gain="per_head")
BIASED = Scheme(**QK, gain="per_head", bias=True)
BLENDED, RATE = 120, 3e-4


class Story:
    """A trained model, its text cut into calibration, training and held-out batches, and its loss."""

    def __init__(self, checkpoint: str, text: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        characters = load_text(text)
        cut = int(len(characters) * 0.9)
        seen, held_out = (tokenize(tokenizer, part) for part in (characters[:cut], characters[cut:]))
        self.base = AutoModelForCausalLM.from_pretrained(checkpoint, use_safetensors=True).eval()
        self.calibration = sample_batches(seen, FITTED, BATCH, LENGTH, seed=1)
        self.training = sample_batches(seen, BLENDED, BATCH, LENGTH, seed=2)
        self.held_out = sample_batches(held_out, 6, BATCH, LENGTH, seed=0)
        self.loss = mean_loss(self.base, self.held_out)

    def patched(self, scheme: Scheme | str, method: str = "ones", steps: int = 120) -> Any:
        model = patch_model(copy.deepcopy(self.base), scheme)
        if method != "ones":
            calibrate(model, self.calibration, method=method, max_tokens=2**20, steps=steps)
        return model.eval()

    def row(self, label: str, scheme: Scheme | str, model: Any, fresh: float | None = None) -> None:
        """Print a line: label, fresh gains' loss, this model's loss, and how much of the jump it removed."""
        fresh = mean_loss(self.patched(scheme), self.held_out) if fresh is None else fresh
        loss = mean_loss(model, self.held_out)
        removed = (fresh - loss) / (fresh - self.loss)
        print(f"| {label} | {fresh:.3f} | {loss:.4f} | {removed:.1%} |", flush=True)


def head(story: Story, first: str) -> None:
    print(f"\nbase {story.loss:.4f}\n\n| {first} | ones | loss | jump removed |\n|---|---:|---:|---:|")


def methods(story: Story) -> None:
    """Every method with the gains that a scheme may have."""
    head(story, "gains, method")
    for label, scheme in (("shared", SHARED), ("per head", PER_HEAD), ("per head, bias", BIASED)):
        for method in ("moments", "fit", "fit_qk"):
            story.row(f"{label}, `{method}`", scheme, story.patched(scheme, method))


def blend(story: Story) -> None:
    """Continued training from an exact start, beside the unpatched control."""
    steps = range(0, BLENDED + 1, 20)
    print(f"\n| held-out loss after step | {' | '.join(map(str, steps))} |\n|---|{'---:|' * len(steps)}")
    control = continued(story, story.patched("none"), None)
    runs = {"unpatched control": control}
    for scheme, method in (*(("qk_norm", method) for method in METHODS), ("qk_norm_cap", "fit")):
        model, schedule = story.patched(scheme, method), BlendSchedule(share=0.5)
        runs[f"`{scheme}`, blend over 60 steps, gains from `{method}`"] = continued(story, model, schedule)
    runs["`qk_norm`, no blend, gains from `fit`"] = continued(story, story.patched("qk_norm", "fit"), None)
    for label, losses in runs.items():
        worst = max(loss - other for loss, other in zip(losses, control, strict=True))
        note = "" if losses is control else f" (end {losses[-1] - control[-1]:+.4f}, worst {worst:+.4f})"
        print(f"| {label}{note} | {' | '.join(f'{loss:.4f}' for loss in losses)} |", flush=True)


def continued(story: Story, model: Any, schedule: BlendSchedule | None) -> list[float]:
    """Held-out losses every 20 steps of training."""
    losses = []

    def each_step(step: int) -> None:
        if schedule is not None:
            set_blend(model, schedule.at(step, BLENDED))
        if step % 20 == 0:
            losses.append(mean_loss(model, story.held_out))

    torch.manual_seed(0)
    train(model, story.training, rate=RATE, what="continuing", each_step=each_step)
    return losses


def fold(story: Story) -> None:
    """qkv_norm: the norm before attention folded away."""
    head(story, "`qkv_norm`, method")
    scheme = Scheme(q="auto", k="auto", v="auto", pre_norm=False)
    fresh = mean_loss(story.patched(scheme), story.held_out)
    for method in ("moments", "fit", "fit_qk"):
        story.row(f"folded, `{method}`", scheme, story.patched(scheme, method), fresh)
    kept = Scheme(q="auto", k="auto", v="auto")
    story.row("the norm kept, `fit`", kept, story.patched(kept, "fit"), fresh)


def cost(story: Story) -> None:
    """What a whole fit of 120 steps costs, in training steps of the same batch."""
    plain, patched = story.patched("none"), story.patched(SHARED)
    batches = [{"input_ids": batch} for batch in story.calibration]

    def training_steps() -> float:
        start = time.perf_counter()
        train(plain, story.training[:5], rate=RATE, what="training")
        return (time.perf_counter() - start) / 5

    steps = [training_steps()]
    start = time.perf_counter()
    moments(patched, batches[:16], norm_sizes(patched, batches[:1]), (0.0,)).put(0.0)
    fit.fit_gains(patched, batches[8:], batches[:8])
    seconds = time.perf_counter() - start
    steps.append(training_steps())
    step = statistics.mean(steps)
    print(
        f"\na fit with its start and its checks: {seconds:.0f} s, {seconds / step:.0f} training steps of {step:.2f} s"
    )


def run(parts: list[Callable[[Story], None]], text: str | None) -> None:
    """The command line of a recipe that prints parts of a story."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--text", required=True)
    named = {part.__name__: part for part in parts}
    parser.add_argument("--part", choices=named, required=True)
    options = parser.parse_args()
    logging.getLogger("hf_qknorm").setLevel(logging.ERROR)
    named[options.part](Story(options.checkpoint, options.text))


if __name__ == "__main__":
    run([methods, blend, fold, cost], __doc__)
