"""Sweep the order of Lp QKNorm: does an order above 2 help, and through the order or through the size of the logits?

    python recipes/benchmarks/lp.py --text tinyshakespeare.txt
    python recipes/benchmarks/lp.py --text tinyshakespeare.txt --size paper --folds 10 --device cuda

After López-Rubio et al. 2026 (arXiv 2602.05006), who train nanoGPT's character model with ten-fold cross-validation.
`--size paper` is that model with its 5000 steps. The default is nanoGPT's model for a CPU, with a fifth of its 2000
steps and four times its learning rate: an hour on one core. The paper does not give its initial gain, so that each
order p is trained from three: Henry's log2(L² − L) for every p ("fixed"), 1 for every p ("one"), and Henry's rescaled
so that p does not change the size of the first logits ("rescaled", the preset `lp`). Each fold holds out another tenth
of the text; all orders see the same batches of a fold. An interrupted sweep continues where it stopped. Without
`--text` the text is the source code of Python's library. Writes a page, its runs and a plot; prints Markdown.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
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

ORDERS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
PAPER = {2.0: "1.405", 2.5: "1.357 to 1.373", 3.0: "1.357 to 1.373", 3.5: "1.357 to 1.373", 4.0: "1.357 to 1.373"}
FRESH = ("fixed", "one", "rescaled")  # gains to start from
POINTS = 30  # of a run's training loss that are kept

SIZES = {
    "quick": (Size(layers=1, heads=2, width=16, length=16, batch=4, steps=6, warmup=2, judge=1), 1e-2),
    "cpu": (Size(layers=4, heads=4, width=128, length=64, batch=12, steps=400, judge=64), 4e-3),
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
    device: str = "cpu"
    threads: int = 1
    out: Path = Path("recipes/results/lp")

    def __post_init__(self) -> None:
        if 2.0 not in self.orders:
            raise ValueError(f"orders {self.orders}: expected 2 among them, which the others are held against")


def run_one(p: float, fresh: str, size: Size, rate: float, text: Characters, seed: int, device: str) -> Row:
    """Train one model with the norm of order `p`, with nanoGPT's optimizer."""
    torch.manual_seed(seed)
    model: Any = size.build(text.vocabulary, dataclasses.replace(SCHEMES["lp"], p=p)).to(device)
    gains = [parameter for name, parameter in model.named_parameters() if name.endswith("q_norm.weight")]
    with torch.no_grad():
        for gain in gains if fresh != "rescaled" else ():
            gain.fill_(fixed_gain(size) if fresh == "fixed" else 1.0)
    optimizer = AdamW(decay_groups(model, 0.1), lr=rate, betas=(0.9, 0.99))
    losses = train(model, text.training(size, seed), optimizer, warmup=size.warmup, floor=0.1, clip=1.0)
    held_out = held_out_loss(model, text.judging(size))
    ends = [round(gain.item(), 2) for gain in gains]
    return {"losses": thinned(losses, POINTS), "held_out": round(held_out, 5), "gains": ends}


def fixed_gain(size: Size) -> float:
    """Return Henry's gain, which does not depend on the order."""
    return initial_scalar_gain(Scheme(q="l2", k="l2", gain="scalar"), "l2", size.length, size.width // size.heads, 1.0)


def sweep(options: Options, runs: Runs) -> dict[tuple[float, str], list[Row]]:
    """Return all runs by order and initial gain, one per fold; folds are completed one by one."""
    size, rate = SIZES[options.size]
    results: dict[tuple[float, str], list[Row]] = {}
    for fold in range(options.folds):
        text = Characters(options.text, fold)
        for p in options.orders:
            for fresh in options.fresh:
                settings = {"p": p, "fresh": fresh, "fold": fold, "rate": rate, "text": text.name, **asdict(size)}
                if p == 2 and fresh != "one":  # there the two are the same
                    settings["fresh"] = "either"
                run = runs.get(settings, lambda: run_one(p, fresh, size, rate, text, fold, options.device))  # noqa: B023
                results.setdefault((p, fresh), []).append(run)
                print(f"fold {fold}, p = {p:g}, {fresh}: {run['held_out']:.3f}", flush=True)
    return results


def against(runs: list[Row], others: list[Row]) -> tuple[float, float]:
    """Return the difference of the held-out loss from that of `others`, fold by fold: mean and standard error."""
    apart = [run["held_out"] - other["held_out"] for run, other in zip(runs, others, strict=True)]
    return statistics.mean(apart), statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")


def page(results: dict[tuple[float, str], list[Row]], options: Options, rows: list[Row]) -> str:
    """Format the results as Markdown."""
    size, rate = SIZES[options.size]
    paragraphs = (__doc__ or "").split("\n\n")
    lines = ["# Lp QKNorm", "", paragraphs[0], "", paragraphs[2].strip(), "", provenance(rows), ""]
    lines += [f"`{size}`, rate {rate:g}, {options.folds} folds, text: {rows[0]['settings']['text']}.", ""]
    lines += [
        "Held-out loss in nats a character, mean over folds, and its distance from p = 2 ± its standard error:",
        "",
    ]
    head = ["p", *(name for fresh in options.fresh for name in (fresh, "from p = 2")), "paper (10.8M)"]
    lines += ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for p in options.orders:
        cells = [f"{p:g}"]
        for fresh in options.fresh:
            runs = results[p, fresh]
            mean, error = against(runs, results[2.0, fresh])
            cells += [f"{statistics.mean(run['held_out'] for run in runs):.4f}"]
            cells += ["" if p == 2 else f"{mean:+.4f} ± {error:.4f}"]
        lines.append("| " + " | ".join([*cells, PAPER.get(p, "")]) + " |")
    return "\n".join([*lines, "", f"![{options.out.name}]({options.out.name}.png)"]) + "\n"


def main(arguments: list[str] | None = None) -> dict[tuple[float, str], list[Row]]:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses(arguments)
    torch.set_num_threads(options.threads)
    runs = Runs(options.out.with_suffix(".jsonl"))
    results = sweep(options, runs)
    text = page(results, options, runs.used)
    replace_text(options.out.with_suffix(".md"), text)
    plot_orders(results, options.out.with_suffix(".png"))
    print(text)
    return results


if __name__ == "__main__":
    main()
