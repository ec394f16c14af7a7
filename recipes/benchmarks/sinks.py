"""Where learned sinks start, and what they do to a trained model: loss, largest logits, entropy.

    python recipes/benchmarks/sinks.py --checkpoint llama-shakespeare --text tinyshakespeare.txt

A trained Llama of 3 million parameters, on rows of 128 tokens. **Start**: with every sink at one logit, the change of
the held-out loss (the last tenth of the text), and the sinks' gradient on a batch of the training text: its median and
the share of heads where it is over 1e-8, Adam's ε, below which Adam's steps vanish. Rule, before the run: the start of
`sinks="learned"` is the lowest of the tried logits at which at least half of the heads have a gradient over 1e-8, if
it changes the loss by less than 0.001 nats; otherwise the next lower one. **Training**: the model trains on for 80
steps of 4 rows of the first nine tenths at 0.001, AdamW without decay, gradients clipped at 1; sinks stay off
("none"), train at the model's rate from the start or at 30 times that rate from the start or from 0, as gpt-oss's do.
Within a seed all arms see the same batches. Reported, for held-out rows: loss, the largest |logit|, the attention
entropy among the tokens, and the share of the attention that the sinks take. 80 steps are short; a difference of less
than two standard errors over the seeds counts as none. A run before fixed lengths and rates: sinks at 0 moved by 0.03
in 150 steps at the model's rate. The log also
holds the runs that were made from -8 before the rule gave the start.
Writes a page and its runs; prints Markdown.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import study
import torch
from markdown_table import table
from paired import Difference
from run_log import Row, Runs, provenance
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import Scheme, logit_statistics, patch_model
from hf_qknorm.demo.training import mean_loss
from hf_qknorm.measure.text import load_text, sample_batches, tokenize
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.head_bias import SINK_START
from hf_qknorm.ops import reference

STARTS = (0.0, -2.0, -4.0, -6.0, -8.0, -10.0, -12.0, -16.0)
ADAM_EPS = 1e-8
RATE, FASTER = 1e-3, 30.0
ARMS: dict[str, tuple[float, float] | None] = {  # the sinks' start, and their rate relative to the model's
    "none": None,
    "start, same rate": (SINK_START, 1.0),
    "start, 30 times the rate": (SINK_START, FASTER),
    "0, 30 times the rate": (0.0, FASTER),
}


@dataclass(frozen=True)
class Size:
    """The length of a run, and of the text that judges it."""

    steps: int = 80
    warmup: int = 8
    batch: int = 4
    length: int = 128
    judged: int = 8


SIZES = {"quick": Size(steps=2, warmup=1, batch=2, length=16, judged=1), "full": Size()}


@dataclass(kw_only=True)
class Options(study.Options):
    """The options of the study."""

    checkpoint: str
    out: Path = Path("recipes/results/sinks")


def with_sinks(checkpoint: str, start: float | None) -> Any:
    """The checkpoint's model, with every sink at `start`, or without sinks but with the same attention function."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    if start is None:
        return patch_model(model, "none", attn_implementation="hf_qknorm")
    patch_model(model, Scheme(sinks="learned"))
    for layer in patched_layers(model).values():
        nn.init.constant_(layer.head_bias("sink").bias, start)
    return model


def at_start(checkpoint: str, batches: dict[str, list[Tensor]], start: float) -> Row:
    """The held-out loss less that without sinks, and the sinks' gradients."""
    model = with_sinks(checkpoint, start)
    change = mean_loss(model, batches["held_out"]) - mean_loss(with_sinks(checkpoint, None), batches["held_out"])
    ids = batches["seen"][0]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    sizes = torch.cat([layer.head_bias("sink").bias.grad.abs() for layer in patched_layers(model).values()])
    return {"change": change, "gradient": float(sizes.median()), "alive": float((sizes > ADAM_EPS).float().mean())}


def trained(checkpoint: str, size: Size, arm: str, batches: dict[str, list[Tensor]]) -> Row:
    """Train one model, and describe its attention on held-out text."""
    start, factor = ARMS[arm] or (None, 1.0)
    model = with_sinks(checkpoint, start).train()
    sinks = [p for name, p in model.named_parameters() if name.endswith("sink.bias")]
    own = {id(p) for p in sinks}
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if id(p) not in own], "rate": RATE}]
    groups += [{"params": sinks, "rate": RATE * factor}] if sinks else []
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    for step, ids in enumerate(batches["seen"], start=1):
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * min(step / size.warmup, 1.0)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    moved = float(torch.cat([p.detach() - start for p in sinks]).abs().max()) if start is not None else 0.0
    return {"loss": mean_loss(model, batches["held_out"]), "moved": moved, **attention_of(model, batches["held_out"])}


@torch.no_grad()
def attention_of(model: Any, batches: list[Tensor]) -> Row:
    """The largest |logit|, the mean entropy among the tokens, and the mean and largest head's share of the sinks."""
    shares: list[Tensor] = []

    def look(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> None:
        found = reference.attention(q, k, v, scale=options["scaling"], causal=True, sinks=options.get("s_aux"))
        shares.append(1 - found.weights.sum(-1).mean((0, 2)))

    layers = patched_layers(model).values()
    with logit_statistics(model) as watched:
        for layer in layers:
            layer.observers += (look,)
        for ids in batches:
            model(input_ids=ids, use_cache=False)
        for layer in layers:
            layer.observers = tuple(one for one in layer.observers if one is not look)
    share = torch.stack(shares).view(len(batches), -1).mean(0)
    return {
        "max_logit": max(float(found.max_logit.max()) for found in watched.values()),
        "entropy": statistics.mean(float(found.entropy.mean()) for found in watched.values()),
        "share": float(share.mean()),
        "largest_share": float(share.max()),
    }


def page(size: Size, starts: dict[float, Row], results: dict[str, list[Row]], runs: Runs) -> str:
    """The study as Markdown."""
    made = f"`{size}`, {len(results['none'])} seeds; {provenance(runs.used)}"
    lines = [*study.opening("Learned sinks", __doc__, made), "## Start", ""]
    cells = [
        [f"{start:g}", f"{row['change']:+.6f}", f"{row['gradient']:.1e}", f"{row['alive']:.0%}"]
        for start, row in starts.items()
    ]
    lines += table(["logit of every sink", "change of the loss", "median gradient", "heads over 1e-8"], cells, "rrrr")
    lines += ["\n## Training\n", 'Means over the seeds; ± is the standard error of the differences from "none".\n']
    head = ["sinks", "loss", "less none", "largest \\|logit\\|", "less none", "entropy (nats)", "less none"]
    cells = []
    for arm, rows in results.items():
        cell = [arm]
        for name, digits in (("loss", 4), ("max_logit", 2), ("entropy", 3)):
            values, others = ([row[name] for row in part] for part in (rows, results["none"]))
            apart = "" if arm == "none" else f"{Difference.of(values, others):.{digits}f}"
            cell += [f"{statistics.mean(values):.{digits}f}", apart]
        cell += [f"{statistics.mean(row['share'] for row in rows):.2%}"]
        cell += [f"{statistics.mean(row['largest_share'] for row in rows):.2%}"]
        cells.append([*cell, f"{max(row['moved'] for row in rows):.2f}"])
    head += ["share of the sinks", "of the head with most", "farthest move of a sink"]
    lines += table(head, cells, "lrrrrrrrrr")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> str:
    """Run what is missing from the log, write the page, and return it."""
    options, runs = study.parse(Options, arguments)
    size = SIZES[options.size]
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    ids = tokenize(tokenizer, load_text(options.text))
    cut = len(ids) * 9 // 10
    held_out = sample_batches(ids[cut:], size.judged, size.batch, size.length, seed=0)

    def batches(seed: int) -> dict[str, list[Tensor]]:
        seen = sample_batches(ids[:cut], size.steps, size.batch, size.length, seed=100 + seed)
        return {"seen": seen, "held_out": held_out}

    starts = {}
    for start in STARTS:
        settings = {"size": options.size, "start": start}
        starts[start] = runs.get(settings, lambda start=start: at_start(options.checkpoint, batches(0), start))
    results: dict[str, list[Row]] = {arm: [] for arm in ARMS}
    for seed in range(options.seeds):
        for arm in ARMS:
            settings = {"size": options.size, "arm": arm, "seed": seed, "from": SINK_START}
            run = lambda arm=arm, seed=seed: trained(options.checkpoint, size, arm, batches(seed))  # noqa: E731
            results[arm].append(runs.get(settings, run))
    return study.publish(page(size, starts, results, runs), options.out)


if __name__ == "__main__":
    main()
