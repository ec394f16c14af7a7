"""Compare two ways to plain norms during training: a sharp knee that falls (KneeSchedule), and a blend (BlendSchedule).

    python recipes/benchmarks/knee_schedule.py --models llama-shakespeare=tinyshakespeare.txt \\
        gpt2-shakespeare=tinyshakespeare.txt

Both arms put RMSNorm on queries and keys and a cap of 50 on logits, and end with plain norms. "blend" starts from the
unpatched model: gains by `moments`, knee 0, and `set_blend` over the first two thirds of the run. "knee" starts from
`calibrate(model, data)`, whose search sets a sharpness of 8 and a knee that costs next to nothing, and lowers this knee
to 0 with `set_knee` over the same steps.

A small model trains for 150 steps at rates of 0.0003, 0.0012 and 0.003 with 3 seeds, one of more than 50 million
parameters for 42 steps at 0.0001 and 0.001 with 2 seeds. SmolLM2-135M-Instruct was planned as well, and has not been
run: the small models had decided the verdict. Within a seed both arms see the same batches: 2×256 tokens from the first
nine tenths of the text, AdamW, gradients clipped at 1, a warm-up of 10 steps (5 for the large model), then a constant
rate, no dropout, fp32. The calibration has 32,768 tokens of the same part (large: 10,240). The held-out loss is over
8,192 tokens of the last tenth every 10 steps, the first look before any step, and over 12,288 at the end (large: 2,048
and 5,120). Differences are the knee's loss minus the blend's in nats, paired over seeds.

The rule was fixed before the runs. The sharp knee replaces the blend if

- (a) at the start its held-out loss on the text of the end is at most 0.003 above that of the same model with the cap
  alone, on each model. The cap's own cost is left out, because no way to this scheme avoids it at the end. The page
  has the difference from the unpatched model too, which decides nothing;
- (b) its mean loss at the end is at most 0.003 above the blend's, for each model and rate;
- (c) the mean of its losses on the way, over all looks, is at most 0.003 above the blend's, for each model and rate.

In (b) and (c) a difference below twice its own standard error does not count as worse. With so few seeds this allowance
passes a large difference where runs differ much, so the page also says what each condition gives without it.
The row of all runs decides nothing. An interrupted comparison continues where it stopped. Writes a page and its runs;
prints Markdown.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import study
import torch
from markdown_table import table
from paired import Difference
from run_log import Row, Runs, provenance
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import BlendSchedule, KneeSchedule, Scheme, calibrate, patch_model, set_blend, set_knee
from hf_qknorm.demo.training import mean_loss
from hf_qknorm.measure.text import load_text, sample_batches, tokenize

ARMS = ("blend", "knee")
CAP = 50.0
SCHEME = Scheme(q="rms", k="rms", softcap=CAP)
LIMIT = 0.003  # nats by which the knee may be worse
LARGE = 50_000_000  # parameters


@dataclass(frozen=True)
class Size:
    """The length of a run, and the batches that it trains on and is judged by."""

    steps: int = 150
    lowered: int = 100
    warmup: int = 10
    look: int = 10
    batch: int = 2
    judging: int = 8  # rows of a batch that calibrates or judges
    length: int = 256
    looked: int = 4
    ended: int = 6
    calibrated: int = 16


QUICK = Size(steps=4, lowered=2, warmup=2, look=2, judging=2, length=32, looked=1, ended=1, calibrated=2)
SIZES: dict[str, tuple[Size, tuple[float, ...], int]] = {  # with the rates and the number of seeds
    "quick": (QUICK, (1e-3,), 2),
    "small": (Size(), (3e-4, 1.2e-3, 3e-3), 3),
    "large": (Size(42, 28, warmup=5, judging=2, ended=10, calibrated=20), (1e-4, 1e-3), 2),
}


@dataclass(kw_only=True)
class Options:
    """The options of the comparison: models as CHECKPOINT=TEXT, the size, and the files without their endings."""

    models: list[str]
    size: str = field(default="full", metadata={"choices": ["quick", "full"]})
    out: Path = Path("recipes/results/knee_schedule")


class Trained:
    """A trained model and its text."""

    def __init__(self, given: str, size: str) -> None:
        self.checkpoint, _, self.source = given.rpartition("=")
        self.name = Path(self.checkpoint).name
        self.model: Any = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32).eval()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        named = "quick" if size == "quick" else "large" if self.model.num_parameters() > LARGE else "small"
        self.size, self.rates, self.seeds = SIZES[named]
        self.settings = {"model": self.name, "text": Path(self.source).name, **asdict(self.size)}

    @cached_property
    def parts(self) -> tuple[Tensor, Tensor]:
        """The tokens of the first nine tenths, and of the last."""
        text, tokenizer = load_text(self.source), AutoTokenizer.from_pretrained(self.checkpoint)
        cut = int(len(text) * 0.9)
        return tokenize(tokenizer, text[:cut]), tokenize(tokenizer, text[cut:])

    @cached_property
    def judging(self) -> list[Tensor]:
        return sample_batches(self.parts[1], self.size.ended, self.size.judging, self.size.length, seed=0)

    @cached_property
    def starts(self) -> dict[str, Any]:
        """The calibrated models that the arms start from."""
        size, models = self.size, {arm: patch_model(copy.deepcopy(self.model), SCHEME) for arm in ARMS}
        batches = sample_batches(self.parts[0], size.calibrated, size.judging, size.length, seed=1)
        for arm, method in (("blend", "moments"), ("knee", None)):
            calibrate(models[arm], batches, method)
        return models

    def before(self) -> Row:
        """The held-out losses before training, and the calibrated knee."""
        capped, knee = patch_model(copy.deepcopy(self.model), Scheme(softcap=CAP)), self.starts["knee"]
        losses = {"unpatched": self.model, "cap alone": capped, "knee": knee}
        found = {name: round(mean_loss(model, self.judging), 5) for name, model in losses.items()}
        return found | {"calibrated": knee.config.scheme.knee, "sharpness": knee.config.scheme.sharpness}

    def run(self, arm: str, rate: float, seed: int) -> Row:
        """Train one model; return its held-out losses, before the first step and on, and at the end."""
        size, model = self.size, copy.deepcopy(self.starts[arm])
        move = mover(arm, model, size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        looks = []
        model.train()
        for step, batch in enumerate(sample_batches(self.parts[0], size.steps, size.batch, size.length, 100 + seed)):
            move(step)
            if step % size.look == 0:
                looks.append(round(mean_loss(model, self.judging[: size.looked]), 5))
            for group in optimizer.param_groups:
                group["lr"] = rate * min((step + 1) / size.warmup, 1.0)
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {"way": looks, "end": round(mean_loss(model, self.judging), 5)}


def mover(arm: str, model: Any, size: Size) -> Callable[[int], None]:
    """A function that sets the arm's blend or knee before a step."""
    share, start = size.lowered / size.steps, model.config.scheme.knee
    blend, knee = BlendSchedule(share), KneeSchedule(share)
    if arm == "blend":
        return lambda step: set_blend(model, blend.at(step, size.steps))
    return lambda step: set_knee(model, knee.at(step, size.steps, start))


def worse(apart: Difference, limit: float = LIMIT) -> bool:
    """Whether a difference is above the limit and twice its standard error; of a single seed, above the limit."""
    return not apart.mean <= limit and not apart.mean <= 2 * apart.error


@dataclass(frozen=True)
class Compared:
    """A model's runs at one rate, or all runs; `end` and `way` are the knee's loss minus the blend's."""

    label: str
    blend: list[Row]
    knee: list[Row]

    @property
    def end(self) -> Difference:
        return Difference.of([run["end"] for run in self.knee], [run["end"] for run in self.blend])

    @property
    def way(self) -> Difference:
        knee, blend = ([statistics.fmean(run["way"]) for run in runs] for runs in (self.knee, self.blend))
        return Difference.of(knee, blend)


def compare(trained: Trained, runs: Runs) -> tuple[Row, list[Compared]]:
    """The starts of a model, and its runs by rate; whole seeds first."""
    found: dict[float, dict[str, list[Row]]] = {rate: {arm: [] for arm in ARMS} for rate in trained.rates}
    start = runs.get({**trained.settings, "part": "start"}, trained.before)
    print(trained.name, start, flush=True)
    for seed in range(trained.seeds):
        for rate, rows in found.items():
            for arm in ARMS:
                settings = {**trained.settings, "arm": arm, "rate": rate, "seed": seed}
                rows[arm].append(runs.get(settings, partial(trained.run, arm, rate, seed)))
                print(f"{trained.name}, seed {seed}, rate {rate:g}, {arm}: {rows[arm][-1]}", flush=True)
    return start, [Compared(f"{trained.name}, {rate:g}", **rows) for rate, rows in found.items()]


def conditions(starts: dict[str, Row], compared: list[Compared]) -> dict[str, tuple[list[str], list[str]]]:
    """What breaks each condition of the rule: with the allowance of standard errors, and without."""
    costs = {name: row["knee"] - row["cap alone"] for name, row in starts.items()}
    first = [f"{name}: {cost:+.4f}" for name, cost in costs.items() if not cost <= LIMIT]
    found = {"(a) the start": (first, first)}
    for name, kind in (("(b) the end", "end"), ("(c) the way", "way")):
        apart = {cell.label: getattr(cell, kind) for cell in compared}
        found[name] = (
            [f"{label}: {each:.4f}" for label, each in apart.items() if worse(each)],
            [f"{label}: {each:.4f}" for label, each in apart.items() if not each.mean <= LIMIT],
        )
    return found


def page(starts: dict[str, Row], compared: list[Compared], made: str) -> str:
    """Format the results as Markdown, the verdict first."""
    found = conditions(starts, compared)
    goes, literal = (not any(broken[kind] for broken in found.values()) for kind in (0, 1))
    lines = study.opening("`KneeSchedule` beside `BlendSchedule`", __doc__, made)
    lines += [f"**By the rule the blend {'goes' if goes else 'stays'}**; without the allowance it would "
              f"{'go' if literal else 'stay'}.", ""]  # fmt: skip
    cells = [[name, *("; ".join(broken) or "kept" for broken in both)] for name, both in found.items()]
    lines += table(["condition", "by the rule", "without the allowance"], cells, "lll")
    lines += ["Held-out loss before training:", ""]
    cells = []
    for name, row in starts.items():
        losses = [row[kind] for kind in ("unpatched", "cap alone", "knee")]
        above = [f"{losses[2] - other:+.4f}" for other in (losses[1], losses[0])]
        cells.append([name, f"{row['calibrated']:g}", *(f"{loss:.4f}" for loss in losses), *above])
    head = ["model", "knee", "unpatched", "cap alone", "cap and knee", "knee over cap alone", "over unpatched"]
    lines += table(head, cells)
    lines += ["Held-out loss during training; differences are the knee's minus the blend's ± standard error:", ""]
    cells = []
    together = {arm: [run for cell in compared for run in getattr(cell, arm)] for arm in ARMS}
    for cell in [*compared, Compared("**all**", **together)]:
        ends = [f"{statistics.fmean(run['end'] for run in runs):.4f}" for runs in (cell.blend, cell.knee)]
        cells.append([cell.label, str(len(cell.knee)), *ends, f"{cell.end:.4f}", f"{cell.way:.4f}"])
    lines += table(["model, rate", "pairs", "blend ends at", "knee ends at", "end", "mean on the way"], cells)
    return "\n".join(lines).rstrip() + "\n"


def main(command: list[str] | None = None) -> str:
    options, runs = study.parse(Options, command)
    starts: dict[str, Row] = {}
    compared: list[Compared] = []
    for given in options.models:
        trained = Trained(given, options.size)
        starts[trained.name], cells = compare(trained, runs)
        compared += cells
        text = study.publish(page(starts, compared, provenance(runs.used)), options.out)
    return text


if __name__ == "__main__":
    main()
