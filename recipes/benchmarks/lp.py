"""Sweep the order of Lp QKNorm: does an order above 2 help, and through the order or through the size of the logits?

    python recipes/benchmarks/lp.py --text tinyshakespeare.txt --jobs 2
    python recipes/benchmarks/lp.py --text tinyshakespeare.txt --size paper --folds 10 --device cuda --minutes 9

After López-Rubio et al. 2026 (arXiv 2602.05006), who train nanoGPT's character model with ten-fold cross-validation.
The paper does not give its initial gain, so that each order p is trained from three: Henry's log2(L² − L) for every p
("fixed"), 1 for every p ("one"), and Henry's rescaled so that p does not change the size of the first logits
("rescaled", the preset `lp`). Each fold holds out another tenth of the text; all orders see the same batches of a fold.
A run counts if it ends under the loss of a trigram table on its fold: above it, attention has hardly been used. If any
run of a column ends above, the column supports no claim. This rule was fixed before the runs.

`--size paper` is the paper's model with its 5000 steps. The default has the shape of the sweep of learning rates.
Without `--text` the text is the source code of Python's library. An interrupted sweep continues where it stopped.
Writes a page, its runs and a plot; prints Markdown.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from markdown_table import table
from paired import Difference
from run_log import Row, Runs, provenance, thinned
from sweep import Characters, Size, held_out_loss, train
from sweep_plots import plot_orders
from torch.optim import AdamW
from transformers import HfArgumentParser

from hf_qknorm import SCHEMES
from hf_qknorm.demo.training import decay_groups
from hf_qknorm.files.atomic_io import replace_text
from hf_qknorm.model.norms import initial_scalar_gain
from hf_qknorm.scheme import Scheme

ORDERS = (1.0, 2.0, 3.0, 4.0)
PAPER = {2.0: "1.405", 2.5: "1.357 to 1.373", 3.0: "1.357 to 1.373", 3.5: "1.357 to 1.373", 4.0: "1.357 to 1.373"}
FRESH = ("fixed", "one", "rescaled")  # gains to start from
POINTS = 30  # of a run's training loss that are kept

SIZES = {
    "quick": (Size(layers=1, heads=2, width=16, length=16, batch=4, steps=6, warmup=2, judge=8), 1e-2),
    "cpu": (Size(layers=2, heads=2, width=64, length=64, batch=8, steps=2000, warmup=100), 4e-3),
    "paper": (Size(layers=6, heads=6, width=384, length=256, batch=64, steps=5000, warmup=100, dropout=0.2), 1e-3),
}


@dataclass
class Options:
    """The options of the sweep."""

    text: str | None = None
    size: str = field(default="cpu", metadata={"choices": list(SIZES)})
    orders: list[float] = field(default_factory=lambda: list(ORDERS))
    fresh: list[str] = field(default_factory=lambda: list(FRESH), metadata={"choices": FRESH})
    folds: int = 3
    jobs: int = 2
    minutes: float = math.inf
    device: str = "cpu"
    out: Path = Path("recipes/results/lp")

    def __post_init__(self) -> None:
        if 2.0 not in self.orders:
            raise ValueError(f"orders {self.orders}: expected 2 among them, which the others are held against")


@cache
def load(source: str | None, fold: int) -> Characters:
    return Characters(source, fold)


def run_one(settings: Row, source: str | None, device: str) -> Row:
    """Train one model with nanoGPT's optimizer; return its losses, those of n-gram tables, and its gains."""
    size, text = Size(**{each.name: settings[each.name] for each in fields(Size)}), load(source, settings["fold"])
    torch.manual_seed(settings["fold"])
    model: Any = size.build(text.vocabulary, dataclasses.replace(SCHEMES["lp"], p=settings["p"])).to(device)
    gains = [parameter for name, parameter in model.named_parameters() if name.endswith("q_norm.weight")]
    with torch.no_grad():
        for gain in gains if settings["fresh"] in ("fixed", "one") else ():
            gain.fill_(fixed_gain(size) if settings["fresh"] == "fixed" else 1.0)
    optimizer = AdamW(decay_groups(model, 0.1), lr=settings["rate"], betas=(0.9, 0.99), fused=True)
    batches = text.training(size, settings["fold"])
    losses = train(model, batches, optimizer, warmup=size.warmup, floor=0.1, clip=1.0, bf16=size.bf16)
    held_out, (bigram, trigram) = held_out_loss(model, text.judging(size)), text.ngram_losses()
    ends = {"held_out": round(held_out, 5), "bigram": round(bigram, 5), "trigram": round(trigram, 5)}
    return {**ends, "losses": thinned(losses, POINTS), "gains": [round(gain.item(), 2) for gain in gains]}


def fixed_gain(size: Size) -> float:
    """Return Henry's gain, which does not depend on the order."""
    return initial_scalar_gain(Scheme(q="l2", k="l2", gain="scalar"), "l2", size.length, size.width // size.heads, 1.0)


def wanted(options: Options) -> dict[tuple[float, str, int], Row]:
    """Return the settings of all runs by order, initial gain and fold; folds are completed one by one."""
    size, rate = SIZES[options.size]
    found = {}
    for fold in range(options.folds):
        name = load(options.text, fold).name
        for p in options.orders:
            for fresh in options.fresh:
                same = p == 2 and fresh != "one"  # there the two are the same
                run = {"p": p, "fresh": "either" if same else fresh, "fold": fold, "rate": rate, "text": name}
                found[p, fresh, fold] = {**run, **asdict(size)}
    return found


def page(results: dict[tuple[float, str], list[Row]], options: Options, rows: list[Row]) -> str:
    """Format the results as Markdown."""
    size, rate = SIZES[options.size]
    paragraphs = (__doc__ or "").split("\n\n")
    lines = ["# Lp QKNorm", "", paragraphs[0], "", paragraphs[2].strip(), "", provenance(rows), ""]
    lines += [f"`{size}`, rate {rate:g}, {options.folds} folds, text: {rows[0]['settings']['text']}.", ""]
    tables = {name: statistics.fmean(row["result"][name] for row in rows) for name in ("bigram", "trigram")}
    lines += [f"A bigram table scores {tables['bigram']:.3f}, a trigram table {tables['trigram']:.3f}: means of folds."]
    lines += ["Held-out loss in nats a character, mean over folds, and its distance from p = 2 ± its standard error:"]
    lines += [""]
    head = ["p", *(name for fresh in options.fresh for name in (fresh, "from p = 2")), "paper (10.8M)"]
    cells = []
    for p in options.orders:
        row = [f"{p:g}"]
        for fresh in options.fresh:
            losses, others = ([run["held_out"] for run in results[order, fresh]] for order in (p, 2.0))
            row += [f"{statistics.mean(losses):.4f}"]
            row += ["" if p == 2 else f"{Difference.of(losses, others):.4f}"]
        cells.append([*row, PAPER.get(p, "")])
    lines += table(head, cells, align="r" * len(head))
    above = {fresh: above_trigram(results, fresh) for fresh in options.fresh}
    lines += ["Runs that ended above the trigram: " + "; ".join(f"{name} {above[name]}" for name in above) + "."]
    return "\n".join([*lines, "", f"![{options.out.name}]({options.out.name}.png)"]) + "\n"


def above_trigram(results: dict[tuple[float, str], list[Row]], fresh: str) -> int:
    """Return how many runs of a column ended above the trigram table's loss on their fold."""
    runs = [run for (_, other), runs in results.items() if other == fresh for run in runs]
    return sum(not run["held_out"] <= run["trigram"] for run in runs)


def main(arguments: list[str] | None = None) -> dict[tuple[float, str], list[Row]]:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses(arguments)
    torch.set_num_threads(1)
    runs = Runs(options.out.with_suffix(".jsonl"))
    settings = wanted(options)
    run = partial(run_one, source=options.text, device=options.device)
    if not runs.run_all(list(settings.values()), run, options.jobs, options.minutes):
        print("Some runs are still to do: give the same command again.")
        return {}
    results: dict[tuple[float, str], list[Row]] = {}
    for (p, fresh, _), each in settings.items():
        results.setdefault((p, fresh), []).append(runs.get(each, partial(run, each)))
    text = page(results, options, runs.used)
    replace_text(options.out.with_suffix(".md"), text)
    plot_orders(results, options.out.with_suffix(".png"))
    print(text)
    return results


if __name__ == "__main__":
    main()
