"""What helps a model that has norms of its own at a high learning rate: a cap, clipped gains, or decayed gains?

    python recipes/benchmarks/own_norms.py --text tinyshakespeare.txt

A Qwen3 of 4 layers and 4 query heads of 32 trains from random weights: 200 steps of 8×128 tokens (bytes) from the first
nine tenths of the text, AdamW with weight decay 0.1 on matrices, gradients clipped at 1, 20 steps of warm-up, then a
constant rate. Within a seed all arms see the same batches. "cap" is the scheme `soft_cap`, "clip" keeps |gain| of the
norms of queries and keys at most 2 after each step, "decay" decays these gains by 0.1 too. The gradient norm is that
before clipping, after the first 40 steps. The held-out loss is over 8 batches of the last tenth. Single runs of
most arms were seen before rates and arms were fixed. A cap lets gains and logits before it grow; clipped or decayed
gains do not. A model of a million parameters for 200 steps does not show the spikes that users report of large ones.
An interrupted comparison continues where it stopped. Writes a page and its runs; prints Markdown.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import study
import torch
from markdown_table import table
from paired import Difference
from run_log import Row, Runs, provenance
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_qknorm import LogitMonitor, patch_model
from hf_qknorm.demo.training import decay_groups, mean_loss
from hf_qknorm.measure.text import sample_batches

ARMS = ("plain", "cap", "clip", "decay")
LARGEST_GAIN, DECAY = 2.0, 0.1


@dataclass(frozen=True)
class Size:
    """The model and the length of a run."""

    layers: int = 4
    width: int = 128
    steps: int = 200
    warmup: int = 20
    settled: int = 40
    batch: int = 8
    length: int = 128


SIZES = {"quick": Size(layers=1, width=32, steps=6, warmup=2, settled=2, batch=2, length=16), "full": Size()}


@dataclass(kw_only=True)
class Options(study.Options):
    """The options of the comparison."""

    rates: list[float] = field(default_factory=lambda: [0.03, 0.1])
    out: Path = Path("recipes/results/own_norms")


def small_qwen3(size: Size) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights, over bytes."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": size.width // 4}
    shape = {"hidden_size": size.width, "intermediate_size": size.width * 11 // 4, "num_hidden_layers": size.layers}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=257, max_position_embeddings=2 * size.length, **shape, **heads, **ends)
    )


def run_one(text: dict[str, torch.Tensor], size: Size, arm: str, rate: float, seed: int) -> Row:
    """Train one model; return its held-out loss, its gradient norms, and what its norms allow in the last step."""
    torch.manual_seed(seed)
    model: Any = small_qwen3(size)
    if arm == "cap":
        patch_model(model, "soft_cap")
    gains = [p for name, p in model.named_parameters() if name.endswith(("q_norm.weight", "k_norm.weight"))]
    groups = decay_groups(model, DECAY)
    if arm == "decay":
        groups[1]["params"] = [p for p in groups[1]["params"] if not any(p is gain for gain in gains)]
        groups.append({"params": gains, "weight_decay": DECAY})
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    monitor, norms = LogitMonitor(every=size.steps), []
    model.train()
    batches = sample_batches(text["seen"], size.steps, size.batch, size.length, seed=100 + seed)
    for step, batch in enumerate(batches, start=1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(step / size.warmup, 1.0)
        with monitor.watch(model, step):
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        for gain in gains if arm == "clip" else ():
            gain.data.clamp_(-LARGEST_GAIN, LARGEST_GAIN)
    held_out = sample_batches(text["held_out"], 8, size.batch, size.length, seed=0)
    seen = monitor.last.scalars() if monitor.last else {}
    found = {name: round(seen[f"attention/{name}"], 2) for name in ("max_logit", "max_gain", "max_bound")}
    spike = max(norms[size.settled :]) / statistics.median(norms[size.settled :])
    return {"loss": round(mean_loss(model, held_out), 4), "spike": round(spike, 2), **found}


def page(size: Size, results: study.Results, runs: Runs) -> str:
    """The comparison as Markdown."""
    seeds = len(next(iter(results.values())))
    made = f"`{size}`, {seeds} seeds; {provenance(runs.used)}"
    lines = study.opening("Models with norms of their own at high rates", __doc__, made)
    lines += ["Means over the seeds, and the largest gradient norm of all:", ""]
    head = ["rate", "arm", "held-out loss (of each seed)", "largest gradient norm, times the median"]
    cells = []
    for (rate, arm), rows in results.items():
        mean = {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
        each = ", ".join(f"{row['loss']:.3f}" for row in rows)
        spike = max(row["spike"] for row in rows)
        numbers = [f"{mean['max_logit']:.1f}", f"{mean['max_gain']:.2f}", f"{mean['max_bound']:.0f}"]
        cells.append([f"{rate:g}", arm, f"{mean['loss']:.3f} ({each})", f"{spike:.1f}", *numbers])
    lines += table([*head, "largest \\|logit\\|", "largest gain", "bound"], cells, align="rlrrrrr")
    return "\n".join([*lines, *remedies(results)]) + "\n"


def remedies(results: study.Results) -> list[str]:
    """The held-out losses less those of the plain model with the same seed, and the worst loss of all, as Markdown."""
    lines = [
        "Held-out loss less that of the plain model with the same seed: mean ± its standard error, and how many seeds "
        "are lower:\n",
    ]
    rows = []
    for rate in dict.fromkeys(rate for rate, _ in results):
        plain, cells = results[rate, "plain"], []
        for arm in ARMS[1:]:
            losses, others = ([run["loss"] for run in runs] for runs in (results[rate, arm], plain))
            lower = sum(loss < other for loss, other in zip(losses, others, strict=True))
            cells.append(f"{Difference.of(losses, others)}, {lower} of {len(losses)}")
        rows.append([f"{rate:g}", *cells])
    lines += table(["rate", *ARMS[1:]], rows, align="r" * len(ARMS))
    worst = max(row["loss"] for rows in results.values() for row in rows)
    return [*lines, f"The highest held-out loss of all runs is {worst:.3f}; one that guesses evenly has 5.549."]


def main(command: list[str] | None = None) -> str:
    options, runs = study.parse(Options, command)
    size, (text, characters) = SIZES[options.size], study.bytes_of(options.text)
    settings = {**asdict(size), "characters": characters}
    results = study.by_rate_and_arm(options, runs, ARMS, settings, partial(run_one, text, size))
    return study.publish(page(size, results, runs), options.out)


if __name__ == "__main__":
    main()
