"""Compare two ways to the plain scheme during training: lowering a knee (KneeSchedule) and blending in (BlendSchedule).

    python recipes/benchmarks/knee_schedule.py --checkpoints ../shared/checkpoints/llama-shakespeare \
        ../shared/checkpoints/gpt2-shakespeare --text ../shared/data/tinyshakespeare.txt

The rule was fixed before the runs. The knee replaces the blend if, for each model and rate, averaged over seeds, its
held-out loss ends at most 0.003 nats above the blend's and is never more than 0.005 above it on the way. A difference
below its own standard error, paired over seeds, does not count as worse. The page shows both outcomes, with and without
this allowance. The row of all runs pairs them by model, rate and seed.

Both arms put the model's own kind of norm on queries and keys, and a cap of 50. "blend" starts from the unpatched model
(gains by `moments`, knee 0), "knee" from a knee of 4 (Llama) or 8 (GPT-2) with gains by `moments`. Within a seed both
see the same batches: 150 steps of 2×256 tokens from the first nine tenths of the text, AdamW, gradients clipped at 1,
10 steps of warm-up, then a constant rate, no dropout, the schedule over the first 100 steps. The held-out loss is over
4 batches of 8×256 tokens of the last tenth every 10 steps, and over 6 at the end. Six seeds were planned, and four were
run for lack of time. An interrupted comparison continues where it stopped. Writes a page and its runs; prints Markdown.
"""

from __future__ import annotations

import copy
import logging
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from markdown_table import table
from paired import Difference
from run_log import Row, Runs, provenance
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from hf_qknorm import BlendSchedule, KneeSchedule, Scheme, calibrate, patch_model, set_blend, set_knee
from hf_qknorm.convert.text import load_text, sample_batches, tokenize
from hf_qknorm.demo.training import mean_loss
from hf_qknorm.files.atomic_io import replace_text
from hf_qknorm.model.attention import as_unpatched, head_norms, patched_layers
from hf_qknorm.model.knees import apply_knee

ARMS = ("blend", "knee")
SCHEME = Scheme(q="auto", k="auto", softcap=50.0)
KNEES = {"llama": 4.0, "gpt2": 8.0}
END, WAY = 0.003, 0.005  # nats by which the knee may be worse


@dataclass(frozen=True)
class Size:
    """The length of a run, and the text that it trains and is evaluated on."""

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


SIZES = {
    "quick": Size(steps=4, lowered=2, warmup=2, look=2, judging=2, length=32, looked=1, ended=1, calibrated=2),
    "full": Size(),
}


@dataclass
class Options:
    """The options of the comparison."""

    checkpoints: list[str]
    text: str
    size: str = field(default="full", metadata={"choices": list(SIZES)})
    rates: list[float] = field(default_factory=lambda: [3e-4, 1.2e-3, 3e-3])
    seeds: int = 4
    threads: int = 1
    out: Path = Path("recipes/results/knee_schedule")


class Trained:
    """A trained model and its text: the starts of both arms, and their batches."""

    def __init__(self, checkpoint: str, text: str, size: Size) -> None:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        characters = load_text(text)
        cut = int(len(characters) * 0.9)
        self.seen, held_out = (tokenize(tokenizer, part) for part in (characters[:cut], characters[cut:]))
        self.base = AutoModelForCausalLM.from_pretrained(checkpoint, use_safetensors=True).eval()
        for module in self.base.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.name, self.size = Path(checkpoint).name, size
        self.knee = KNEES[self.base.config.model_type]
        self.calibration = sample_batches(self.seen, size.calibrated, size.judging, size.length, seed=1)
        self.judging = sample_batches(held_out, size.ended, size.judging, size.length, seed=0)
        self.starts = {arm: self.start(arm) for arm in ARMS}

    def start(self, arm: str) -> Any:
        model = patch_model(copy.deepcopy(self.base), SCHEME)
        if arm == "knee":
            apply_knee(model, self.knee, mean_squares(model, self.calibration))
        calibrate(model, self.calibration, "moments", max_tokens=2**20)
        return model

    def batches(self, seed: int) -> list[Tensor]:
        return sample_batches(self.seen, self.size.steps, self.size.batch, self.size.length, seed=100 + seed)


@torch.no_grad()
def mean_squares(model: Any, batches: list[Tensor]) -> dict[tuple[str, str], float]:
    """The mean of x² in front of each norm of the unpatched model, with LayerNorm after the mean is taken off."""
    sums: dict[tuple[str, str], list[Tensor]] = {}
    hooks = []
    for name, layer in patched_layers(model).items():
        for norm_name, norm in head_norms(layer).items():
            found = sums.setdefault((name, norm_name), [])

            def add(module: Any, args: tuple[Tensor, ...], found: list[Tensor] = found) -> None:
                x = args[0].double()
                found.append((x - x.mean(-1, keepdim=True) if module.norm == "layer" else x).square().mean())

            hooks.append(norm.register_forward_pre_hook(add))
    with as_unpatched(model):
        for batch in batches:
            model(input_ids=batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {key: float(torch.stack(found).mean()) for key, found in sums.items()}


def run_one(trained: Trained, arm: str, rate: float, seed: int) -> Row:
    """Train one model; return its held-out losses over the run, from before the first step on, and at the end."""
    size, model = trained.size, copy.deepcopy(trained.starts[arm])
    share, start = size.lowered / size.steps, model.config.scheme.knee
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    looks = []
    model.train()
    for step, batch in enumerate(trained.batches(seed)):
        if arm == "blend":
            set_blend(model, BlendSchedule(share).at(step, size.steps))
        else:
            set_knee(model, KneeSchedule(share).at(step, size.steps, start))
        if step % size.look == 0:
            looks.append(round(mean_loss(model, trained.judging[: size.looked]), 5))
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / size.warmup, 1.0)
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"way": looks, "end": round(mean_loss(model, trained.judging), 5)}


def worse(apart: Difference, limit: float) -> bool:
    """Whether a difference is above the limit and its own standard error; of a single seed, above the limit."""
    return apart.mean > limit and not apart.mean <= apart.error


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
    def way(self) -> list[Difference]:
        looks = range(len(self.knee[0]["way"]))
        losses = [[[run["way"][i] for run in runs] for runs in (self.knee, self.blend)] for i in looks]
        return [Difference.of(knee, blend) for knee, blend in losses]

    @property
    def literal(self) -> bool:
        """Whether the knee is as good as the rule asks, by the plain means."""
        return self.end.mean <= END and all(apart.mean <= WAY for apart in self.way)

    @property
    def kept(self) -> bool:
        """Whether it is by the rule, which lets pass a difference below its standard error."""
        return not worse(self.end, END) and not any(worse(apart, WAY) for apart in self.way)


def compare(options: Options, runs: Runs) -> list[Compared]:
    """All runs by model and rate, those that were done before included; whole seeds first."""
    size = SIZES[options.size]
    results: dict[tuple[str, float], dict[str, list[Row]]] = {}
    everything = [Trained(checkpoint, options.text, size) for checkpoint in options.checkpoints]
    for seed in range(options.seeds):
        for trained in everything:
            for rate in options.rates:
                for arm in ARMS:
                    settings = {"model": trained.name, "arm": arm, "rate": rate, "seed": seed, **asdict(size)}
                    settings["knee"] = trained.knee if arm == "knee" else 0.0
                    run = runs.get(settings, lambda: run_one(trained, arm, rate, seed))  # noqa: B023
                    results.setdefault((trained.name, rate), {}).setdefault(arm, []).append(run)
                    print(f"seed {seed}, {trained.name}, rate {rate:g}, {arm}: {run['end']:.4f}", flush=True)
    return [Compared(f"{name}, {rate:g}", **arms) for (name, rate), arms in results.items()]


def page(compared: list[Compared], options: Options, rows: list[Row]) -> str:
    """Format the results as Markdown."""
    size = SIZES[options.size]
    together = {arm: [run for cell in compared for run in getattr(cell, arm)] for arm in ARMS}
    names = " ".join(Path(checkpoint).name for checkpoint in options.checkpoints)
    command = f"python recipes/benchmarks/knee_schedule.py --checkpoints {names} --text {Path(options.text).name}"
    lines = ["# `KneeSchedule` beside `BlendSchedule`", "", f"```\n{command}\n```", ""]
    lines.append("\n\n".join((__doc__ or "").split("\n\n")[2:4]).strip())
    lines += ["", f"{provenance(rows)} {options.seeds} seeds.", ""]
    lines += ["Held-out loss of the knee minus the blend's, in nats:", ""]
    head, cells = ["model, rate", "blend ends at", "knee ends at", "end", "worst on the way", "there"], []
    for cell in [*compared, Compared("**all**", **together)]:
        worst = max(range(len(cell.way)), key=lambda i: cell.way[i].mean)
        ends = [f"{statistics.mean(run['end'] for run in runs):.4f}" for runs in (cell.blend, cell.knee)]
        verdicts = ["kept" if kept else "**missed**" for kept in (cell.literal, cell.kept)]
        differences = [f"{cell.end:.4f}", f"{cell.way[worst]:.4f}", f"step {worst * size.look}"]
        cells.append([cell.label, *ends, *differences, *verdicts])
    lines += table([*head, "literal", "by the rule"], cells, align="lrrrrrll")
    lines += ["All evaluations, mean difference ± standard error over seeds:", ""]
    steps = range(0, size.steps, size.look)
    cells = [[str(step), *(f"{cell.way[i]:.4f}" for cell in compared)] for i, step in enumerate(steps)]
    lines += table(["step", *(cell.label for cell in compared)], cells, align="r" * (len(compared) + 1))
    literal, kept = all(cell.literal for cell in compared), all(cell.kept for cell in compared)
    lines += [f"By the plain means the blend {'goes' if literal else 'stays'}; "
              f"**by the rule the blend {'goes' if kept else 'stays'}**."]  # fmt: skip
    return "\n".join([*lines, "", *misses(compared, size)]) + "\n"


def misses(compared: list[Compared], size: Size) -> list[str]:
    """The cells that miss the rule, each with the differences above its limits and their own standard errors."""
    lines = [f"The rule holds for {sum(cell.kept for cell in compared)} of {len(compared)}. Misses, with what is above "
             "both the limit and its own standard error:", ""]  # fmt: skip
    for cell in compared:
        found = [f"{cell.end:.4f} at the end ({END:g} allowed)"] * worse(cell.end, END)
        found += [f"{apart:.4f} at step {i * size.look}" for i, apart in enumerate(cell.way) if worse(apart, WAY)]
        lines += [f"- {cell.label}: {'; '.join(found)} ({WAY:g} allowed on the way)"] * bool(found)
    evaluations = len(compared) * len(compared[0].way)
    return [*lines, "", f"Of {evaluations} evaluations on the way, some lie above their standard error by chance."]


def main(arguments: list[str] | None = None) -> list[Compared]:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses(arguments)
    logging.getLogger("hf_qknorm").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    runs = Runs(options.out.with_suffix(".jsonl"))
    compared = compare(options, runs)
    text = page(compared, options, runs.used)
    replace_text(options.out.with_suffix(".md"), text)
    print(text)
    return compared


if __name__ == "__main__":
    main()
