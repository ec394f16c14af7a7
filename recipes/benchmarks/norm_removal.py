"""Remove the norms of queries and keys from a trained Qwen 3: at once, by a gate, or by a knee that rises to infinity.

    python recipes/benchmarks/norm_removal.py --text tinyshakespeare.txt

A Qwen 3 of 4 layers and 4 query heads of 32 is trained with its norms first: 1,000 steps of 8×128 tokens (bytes) from
the first nine tenths of the text, AdamW at 0.003 with weight decay 0.1 on matrices, gradients clipped at 1, a warm-up
of 20 steps and a cosine to a tenth. Each run then trains it on for 200 steps in the same way, at its rate, on batches
that all arms of a seed share. The schedules take the first three quarters of the run. The held-out loss is over 16
batches of 8×128 tokens of the last tenth. Nothing but the batches depends on the seed.

- "kept": the norms stay.
- "at once": every norm is replaced by its constant factor, folded away, before the first step.
- "gate": as TaperNorm (Kanavalau et al. 2026, arXiv 2602.10408), y = g·norm(x)·γ + (1 − g)·c·γ·x, where g falls along a
  cosine, and c is the inverse root of the mean square of the norm's inputs before the run.
- "knee": `KneeSchedule(target=math.inf)`: the norm divides by √((1 − t)·mean x² + t·P), where t rises along a cosine.

All but "kept" start from `start_removal`, which gives the heads of a layer equal mean squares, and are evaluated after
`remove_norms`, as a plain Llama. The cost of a removal is the held-out loss less that of "kept" with
the same rate and seed, ± its standard error over seeds. Rates, seeds, arms and the following rules were fixed before
the runs. A way beats another at a rate if the difference is above twice its standard error. The knee is called as good
as the gate if it does not end worse than it by that measure at any rate. The page also has the largest cost on the way
(every 25 steps, over 4 of the batches), and the loss of removals without training, at several knees, with and without
equal heads. Of the three seeds that were planned, the third was run after the results of two had been seen. An
interrupted comparison continues where it stopped. Writes a page and its runs; prints Markdown.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import own_norms
import study
import torch
from markdown_table import table
from own_norms import small_qwen3
from paired import Difference
from run_log import Row, Runs, provenance
from torch import Tensor, nn

from hf_qknorm import KneeSchedule, logit_statistics, remove_norms, set_knee, start_removal
from hf_qknorm.demo.training import mean_loss, train
from hf_qknorm.measure.text import sample_batches
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.training import removal

ARMS = ("kept", "at once", "gate", "knee")
KNEES = (0.0, 0.25, 1.0, 4.0, 16.0, math.inf)
SHARE = 0.75  # of the run, for the schedules


@dataclass(frozen=True)
class Size:
    """The model, and the lengths of its first training (`base` steps) and of a run."""

    layers: int = 4
    width: int = 128
    batch: int = 8
    length: int = 128
    base: int = 1000
    base_rate: float = 3e-3
    steps: int = 200
    warmup: int = 20
    look: int = 25
    looked: int = 4
    judged: int = 16


SIZES = {"quick": Size(1, 32, 2, 16, base=3, steps=4, warmup=2, look=2, looked=1, judged=1), "full": Size()}


@dataclass(kw_only=True)
class Options(study.Options):
    """The options of the comparison; `work` holds the weights of the first training."""

    rates: list[float] = field(default_factory=lambda: [3e-4, 3e-3])
    work: Path = Path("norm_removal.pt")
    out: Path = Path("recipes/results/norm_removal")


class Trained:
    """The Qwen 3 that was trained with its norms, and the text."""

    def __init__(self, options: Options) -> None:
        self.size = size = SIZES[options.size]
        text, _ = study.bytes_of(options.text)
        self.seen = text["seen"]
        self.judging = sample_batches(text["held_out"], size.judged, size.batch, size.length, seed=0)
        torch.manual_seed(0)
        self.model: Any = small_qwen3(own_norms.Size(size.layers, size.width, length=size.length))
        study.trained_once(self.model, options.work, self._train)

    def _train(self) -> None:
        batches, size = self.batches(self.size.base, 0), self.size
        train(self.model, batches, rate=size.base_rate, warmup=size.warmup, decay=True, desc="Qwen 3")

    def batches(self, steps: int, seed: int) -> list[Tensor]:
        return sample_batches(self.seen, steps, self.size.batch, self.size.length, seed)

    def start(self) -> Any:
        """The model as a patched Llama whose norms can be removed."""
        return start_removal(copy.deepcopy(self.model), self.batches(16, seed=1))


class Gate:
    """TaperNorm's gate g on every norm of a model that `start_removal` prepared, as hooks on them."""

    def __init__(self, model: nn.Module) -> None:
        self.gate = 1.0
        self.hooks = []
        for layer in patched_layers(model).values():
            for norm in head_norms(layer).values():
                constant = (norm.mean_power() + norm.scheme_eps) ** -0.5
                self.hooks.append(norm.register_forward_hook(partial(self._mix, constant)))

    def _mix(self, constant: float, norm: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return self.gate * out + (1 - self.gate) * constant * norm.weight * args[0]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


def schedule(arm: str, model: Any, steps: int) -> tuple[Callable[[int], None], Callable[[], Any]]:
    """Functions that set the norms before a step, and that make the final model."""

    def end() -> Any:
        set_knee(model, math.inf)
        return remove_norms(model)

    if arm == "kept":
        return (lambda step: None), lambda: model
    if arm == "at once":
        end()
        return (lambda step: None), lambda: model
    if arm == "knee":
        way = KneeSchedule(SHARE, target=math.inf)
        return (lambda step: set_knee(model, way.at(step, steps, removal.START))), end
    gate, clock = Gate(model), KneeSchedule(SHARE, target=math.inf)

    def set_gate(step: int) -> None:
        gate.gate = (1 + math.cos(math.pi * clock.done(step, steps))) / 2

    def ungated() -> Any:
        gate.remove()
        return end()

    return set_gate, ungated


def run_one(trained: Trained, arm: str, rate: float, seed: int) -> Row:
    """Train one model on; return its held-out losses on the way and at its end, and its largest |logit|."""
    size = trained.size
    model = copy.deepcopy(trained.model) if arm == "kept" else trained.start()
    before_step, end = schedule(arm, model, size.steps)
    way: list[float] = []

    def each_step(step: int) -> None:
        if step < size.steps:
            before_step(step)
            if step % size.look == 0:
                way.append(round(mean_loss(model, trained.judging[: size.looked]), 5))

    batches = trained.batches(size.steps, 100 + seed)
    train(model, batches, rate=rate, warmup=size.warmup, decay=True, desc=None, each_step=each_step)
    final = end().eval()
    with torch.no_grad(), logit_statistics(final) as seen:
        loss = mean_loss(final, trained.judging)
    logit = max(float(layer.max_logit.max()) for layer in seen.values())
    return {"way": way, "end": round(loss, 5), "logit": round(logit, 2), "type": type(final).__name__}


def without_training(trained: Trained) -> list[str]:
    """The held-out loss of the trained model at several knees, with equal heads and without, as Markdown."""
    started = trained.start()
    plain = removal._as_llama(trained.model)
    means = {key: float(found.mean()) for key, found in removal._mean_powers(plain, _inputs(trained)).items()}
    removal.apply_knee(plain, removal.START, means)
    rows = []
    for name, model in (("equal heads", started), ("heads as they are", plain)):
        losses = []
        for knee in KNEES:
            moved = copy.deepcopy(model)
            set_knee(moved, knee)
            losses.append(f"{mean_loss(moved, trained.judging):.4f}")
        rows.append([name, *losses])
    return table(["held-out loss at a knee of", *("∞" if knee == math.inf else f"{knee:g}" for knee in KNEES)], rows)


def _inputs(trained: Trained) -> list[dict[str, Tensor]]:
    return [{"input_ids": batch} for batch in trained.batches(16, seed=1)]


def page(trained: Trained, options: Options, results: study.Results, runs: Runs) -> str:
    """The comparison as Markdown."""
    made = f"`{trained.size}`, {options.seeds} seeds; {provenance(runs.used)}"
    lines = [*study.opening("Removing the norms of a trained Qwen 3", __doc__, made), "## Without training", ""]
    lines += [
        "The trained model, and a removal in part (a knee) or whole (∞), with gains that keep the mean length:",
        "",
    ]
    lines += [*without_training(trained), "## With training", ""]
    rows = []
    for (rate, arm), found in results.items():
        kept, size = results[rate, "kept"], trained.size
        ends = [run["end"] for run in found]
        apart = [
            Difference.of([r["way"][i] for r in found], [r["way"][i] for r in kept]) for i in range(len(kept[0]["way"]))
        ]
        worst = max(range(len(apart)), key=lambda i: apart[i].mean)
        cost = "" if arm == "kept" else f"{Difference.of(ends, [run['end'] for run in kept]):.4f}"
        way = "" if arm == "kept" else f"{apart[worst]:.3f}, step {worst * size.look}"
        logit = sum(run["logit"] for run in found) / len(found)
        each = ", ".join(f"{end:.4f}" for end in ends)
        rows.append([f"{rate:g}", arm, f"{sum(ends) / len(ends):.4f} ({each})", cost, way, f"{logit:.1f}"])
    head = ["rate", "arm", "held-out loss at the end (of each seed)", "cost", "largest cost on the way"]
    lines += table([*head, "largest \\|logit\\|"], rows, align="rlrrrr")
    lines += ['The loss at the end is that of the exported model: Llama without norms, or for "kept" Qwen 3.', ""]
    return "\n".join([*lines, *verdicts(results)]) + "\n"


def verdicts(results: study.Results) -> list[str]:
    """The rule's outcome for each pair of ways, as lines of a Markdown list."""
    lines, good = [], True
    for rate in dict.fromkeys(rate for rate, _ in results):
        for arm, other in (("knee", "gate"), ("knee", "at once"), ("gate", "at once")):
            losses, others = ([run["end"] for run in results[rate, name]] for name in (arm, other))
            apart = Difference.of(losses, others)
            good = good and not (other == "gate" and apart.verdict == "worse")
            lines.append(f"- Rate {rate:g}: {arm} less {other} is {apart:.4f}: {apart.verdict}.")
    return [*lines, f"- By the rule, the knee is {'as good as' if good else 'worse than'} the gate."]


def main(command: list[str] | None = None) -> str:
    options, runs = study.parse(Options, command)
    trained = Trained(options)
    settings = {**asdict(trained.size), "text": Path(options.text).name}
    results = study.by_rate_and_arm(options, runs, ARMS, settings, partial(run_one, trained))
    return study.publish(page(trained, options, results, runs), options.out)


if __name__ == "__main__":
    main()
