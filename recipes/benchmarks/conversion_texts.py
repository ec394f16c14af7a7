"""Measure what the default call keeps with little text, on other text, and at positions beyond the calibrated ones.

    python recipes/benchmarks/conversion_texts.py --checkpoint ../shared/checkpoints/llama-shakespeare \
        --text ../shared/data/tinyshakespeare.txt --other wikitext-test.txt --part texts

Parts: tokens, positions, and texts, which also takes the source code of Python's library and the files of `--other`.
The data is that of `conversion.py`. Prints Markdown; finished runs are stored in `--runs`.

Targets: at least 98 % of the jump removed with 20,000 tokens; up to four times the calibrated length, no stretch of
positions more than 0.02 nats above the unpatched model; a rise on other text of at most twice that on the calibration
text.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conversion import BATCH, LENGTH, SEEDS, TEXT, Story, chosen, ends, run, spread
from run_log import Row
from torch import Tensor

from hf_qknorm.demo.training import mean_loss
from hf_qknorm.measure.text import load_text, sample_batches

# Batches of 8×256 tokens that calibrate for the parts about texts and positions; one seed, as others give the same.
SHORT = 16
STRETCH = 32  # positions


def tokens(story: Story) -> None:
    """Measure how much text the default call needs."""
    base, ones = ends(story)

    def measured(count: int, seed: int) -> Row:
        model = story.converted(story.batches(seed, TEXT), max_tokens=count)
        return {"knee": model.config.scheme.knee, "loss": mean_loss(model, story.judged)}

    print(f"\n{story.name}\n\n| tokens of text | knee | rise, 3 texts | jump removed |\n|---:|---|---:|---:|")
    for count in (20_000,):
        rows = [story.get("tokens", partial(measured, count, seed), tokens=count, seed=seed) for seed in SEEDS]
        removed = spread([(ones - row["loss"]) / (ones - base) for row in rows], ".2%")
        print(f"| {count:,} | {chosen(rows)} | {spread([row['loss'] - base for row in rows])} | {removed} |")


def positions(story: Story) -> None:
    """Measure the rise by position, up to four times the calibrated length, or to the end of learned positions."""
    reach = story.base.config.max_position_embeddings if hasattr(story.base.config, "n_positions") else 4 * LENGTH
    length = reach // 4
    judged = sample_batches(story.unseen, 12, BATCH // 2, reach, seed=0)

    def measured(seed: int) -> Row:
        model = story.converted(story.batches(seed, SHORT * LENGTH // length, length))
        rise = losses_by_position(model, judged) - losses_by_position(story.base, judged)
        return {"knee": model.config.scheme.knee, "rises": rise.view(-1, reach // 8).mean(1).tolist(),
                "worst": float(rise[: reach // STRETCH * STRETCH].view(-1, STRETCH).mean(1).max())}  # fmt: skip

    row = story.get("positions", partial(measured, SEEDS[0]), length=length, seed=SEEDS[0])
    print(f"\n{story.name}, calibrated at {length}: knee {row['knee']:g}\n\n| positions | rise |\n|---|---:|")
    for i, rise in enumerate(row["rises"]):
        print(f"| {i * reach // 8} to {(i + 1) * reach // 8 - 1} | {rise:+.4f} |")
    print(f"| the worst {STRETCH} | {row['worst']:+.4f} |")


@torch.no_grad()
def losses_by_position(model: Any, batches: list[Tensor]) -> Tensor:
    """Return the mean loss at each position; 0 for the last, which has no next token."""
    total = torch.zeros(batches[0].shape[1])
    for batch in batches:
        logits = model(batch, use_cache=False).logits[:, :-1]
        nll = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        total[:-1] += nll.view(len(batch), -1).mean(0)
    return total / len(batches)


def texts(story: Story) -> None:
    """Calibrate on one text and evaluate on another."""
    sources = [story.text, None, *story.other]
    names = ["Python's library" if source is None else Path(source).stem for source in sources]
    parts = {name: story.cut(load_text(source, 1_200_000)) for name, source in zip(names, sources, strict=True)}
    judged = {name: sample_batches(unseen, 6, BATCH, LENGTH, seed=0) for name, (_, unseen) in parts.items()}

    def measured(name: str, seed: int) -> Row:
        model = story.converted(sample_batches(parts[name][0], SHORT, BATCH, LENGTH, seed=seed))
        losses = {at: mean_loss(model, batches) for at, batches in judged.items()}
        return {"knee": model.config.scheme.knee, "losses": losses}

    base = story.get("texts", lambda: {name: mean_loss(story.base, b) for name, b in judged.items()}, call="base")
    print(f"\n{story.name}\n\n| calibrated on | knee | {' | '.join(f'rise on {name}' for name in names)} |")
    print(f"|---|---|{'---:|' * len(names)}")
    print(f"| unpatched, loss | | {' | '.join(f'{base[name]:.4f}' for name in names)} |")
    for name in names:
        row = story.get("texts", partial(measured, name, SEEDS[0]), on=name, seed=SEEDS[0])
        rises = [f"{row['losses'][at] - base[at]:+.4f}" for at in names]
        print(f"| {name} | {row['knee']:g} | {' | '.join(rises)} |", flush=True)


if __name__ == "__main__":
    run([tokens, positions, texts], __doc__)
