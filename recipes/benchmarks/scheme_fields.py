"""The effect of two fields of a scheme on a trained model: norms over all heads, a learned temperature of each head.

    python recipes/benchmarks/scheme_fields.py --checkpoints llama-shakespeare gpt2-shakespeare \\
        --known tinyshakespeare.txt --text wikitext2-valid.txt

**Conversion.** Each model is converted to the scheme `qk_norm` with a norm for each head and with one over all heads
(`width="all"`): with fresh gains, with gains by "moments" and no knee, and with the knee that "auto" finds, from 32
batches of 8×128 tokens of the known text. The cost is the rise in loss on 16 batches of its last tenth. A seed gives
other calibration batches. **Training.** The first model trains on with the other text, for 120 steps of 4×128 tokens:
AdamW with weight decay 0.1 on matrices, gradients clipped at 1, a warm-up of 12 steps and a cosine to a tenth of the
rate. Within a seed all arms see the same batches. Norms are calibrated on the known text with "auto", and keep their
knee. Temperatures start at 1 and train at the model's rate. The held-out loss is over 16 batches of 4×128 tokens of the
other text's last tenth.

These rules were fixed before the runs. A conversion keeps what the model knew if "auto" costs at most 0.01 nats in the
mean over the seeds, for every model. A temperature helps, or norms over all heads beat norms for each head, at a rate
if the difference of the losses, paired over seeds, is above twice its standard error. An interrupted comparison
continues where it stopped. Writes a page and its runs; prints Markdown.
"""

from __future__ import annotations

import copy
import statistics
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import study
import torch
from continued_run import corpus
from markdown_table import table
from paired import Difference
from run_log import Row, provenance
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_qknorm import Scheme, calibrate, logit_statistics, patch_model
from hf_qknorm.demo.training import mean_loss, train
from hf_qknorm.measure.text import sample_batches
from hf_qknorm.model.attention import head_biases, patched_layers

NORMS, WIDE = Scheme(q="auto", k="auto"), Scheme(q="auto", k="auto", width="all")
WIDTHS: Final = {"each head": NORMS, "all heads": WIDE}
# The ways to convert: method and knee of `calibrate`.
WAYS: Final[dict[str, tuple[str, float | str]]] = {
    "fresh gains": ("ones", 0.0),
    "moments": ("moments", 0.0),
    "auto": ("moments", "auto"),
}
ARMS: Final[dict[str, Scheme]] = {
    "unpatched": Scheme(),
    "temperature": Scheme(temperature="learned"),
    "qk_norm": NORMS,
    "qk_norm, temperature": Scheme(q="auto", k="auto", temperature="learned"),
    "qk_norm, all heads": WIDE,
}
COMPARED: Final = (
    ("temperature", "unpatched"), ("qk_norm, temperature", "qk_norm"), ("qk_norm, all heads", "qk_norm"),
)  # fmt: skip
KEPT: Final = 0.01  # nats that a conversion may cost


@dataclass(frozen=True)
class Size:
    """The lengths of a calibration, of a run, and of the text that judges it."""

    calibrated: int = 32
    batch: int = 8
    steps: int = 120
    warmup: int = 12
    train_batch: int = 4
    length: int = 128
    judged: int = 16
    characters: int = 1_200_000


SIZES = {"quick": Size(11, 2, steps=3, warmup=1, train_batch=2, length=32, judged=2), "full": Size()}


@dataclass(kw_only=True)
class Options(study.Options):
    """The options of the comparison; `known` is the text that the models were trained on."""

    checkpoints: list[str]
    known: str
    rates: list[float] = field(default_factory=lambda: [1e-3, 3e-2])
    out: Path = Path("recipes/results/scheme_fields")


class Subject:
    """A trained model, the text that it knows, and another."""

    def __init__(self, checkpoint: str, options: Options) -> None:
        self.name, self.size = Path(checkpoint).name, SIZES[options.size]
        self.known, self.text = (
            corpus(source, checkpoint, self.size.characters) for source in (options.known, options.text)
        )
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        self.patched = cache(self._patched)

    def batches(self, ids: Tensor, count: int, rows: int, seed: int) -> list[Tensor]:
        return sample_batches(ids, count, rows, self.size.length, seed)

    def _patched(self, scheme: Scheme, method: str, knee: float | str, seed: int) -> Any:
        """The model with the scheme, whose norms are calibrated."""
        model = patch_model(copy.deepcopy(self.model), scheme)
        if scheme.norms:
            known = self.batches(self.known.seen, self.size.calibrated, self.size.batch, 200 + seed)
            calibrate(model, known, method, knee=knee)  # type: ignore[arg-type]
        return model


def convert(subject: Subject, width: str, way: str, seed: int) -> Row:
    """Convert a model in one way; return the rise in its loss, and its knee."""
    judging = subject.batches(subject.known.held_out, subject.size.judged, subject.size.batch, seed=0)
    model = subject.patched(WIDTHS[width], *WAYS[way], seed)
    rise = mean_loss(model, judging) - mean_loss(subject.model, judging)
    return {"rise": round(rise, 5), "knee": model.config.scheme.knee}


def train_on(subject: Subject, arm: str, rate: float, seed: int) -> Row:
    """Train one model on; return its held-out loss, its largest |logit|, and the temperatures' extremes."""
    size = subject.size
    model = copy.deepcopy(subject.patched(ARMS[arm], *WAYS["auto"], 0))
    batches = subject.batches(subject.text.seen, size.steps, size.train_batch, 100 + seed)
    train(model, batches, rate=rate, warmup=size.warmup, decay=True, desc=None)
    judging = subject.batches(subject.text.held_out, size.judged, size.train_batch, seed=0)
    with torch.no_grad(), logit_statistics(model.eval()) as seen:
        loss = mean_loss(model, judging)
    largest = max(float(layer.max_logit.max()) for layer in seen.values())
    learned = [each.bias.exp() for layer in patched_layers(model).values() for each in head_biases(layer).values()]
    extremes = [round(float(x), 3) for x in torch.cat(learned).aminmax()] if learned else []
    return {"end": round(loss, 5), "logit": round(largest, 2), "temperatures": extremes}


def conversions(found: dict[tuple[str, str, str], list[Row]]) -> list[str]:
    """The costs of the conversions and the rule's outcome, as Markdown."""
    rows, kept = [], dict.fromkeys(WIDTHS, True)
    for (model, width, way), runs in found.items():
        rises = [run["rise"] for run in runs]
        kept[width] &= way != "auto" or statistics.mean(rises) <= KEPT
        each, knees = (
            ", ".join(f"{run[name]:{form}}" for run in runs) for name, form in (("rise", "+.4f"), ("knee", "g"))
        )
        rows.append([model, width, way, f"{statistics.mean(rises):+.4f} ({each})", knees])
    lines = table(["model", "a norm over", "gains", "rise in loss (of each seed)", "knees"], rows, align="lllrr")
    return [*lines, *(f"- Norms over {width}: {_verdict(good)}" for width, good in kept.items()), ""]


def _verdict(good: bool) -> str:
    return f"by the rule, the conversion {'keeps what the models knew' if good else f'costs more than {KEPT:g} nats'}."


def trainings(results: study.Results) -> list[str]:
    """The losses after training and the rule's outcomes, as Markdown."""
    rows = []
    for (rate, arm), runs in results.items():
        ends = [run["end"] for run in runs]
        each = ", ".join(f"{end:.4f}" for end in ends)
        learned = [x for run in runs for x in run["temperatures"]]
        logit = statistics.mean(run["logit"] for run in runs)
        extremes = f"{min(learned):.2f} to {max(learned):.2f}" if learned else ""
        rows.append([f"{rate:g}", arm, f"{statistics.mean(ends):.4f} ({each})", f"{logit:.1f}", extremes])
    head = ["rate", "arm", "held-out loss (of each seed)", "largest \\|logit\\|", "temperatures"]
    lines = table(head, rows, align="rlrrr")
    for rate in dict.fromkeys(rate for rate, _ in results):
        for arm, other in COMPARED:
            apart = Difference.of(*([run["end"] for run in results[rate, name]] for name in (arm, other)))
            lines.append(f"- Rate {rate:g}: {arm} less {other} is {apart:.4f}: {apart.verdict}.")
    return lines


def main(command: list[str] | None = None) -> str:
    options, runs = study.parse(Options, command)
    subjects = [Subject(checkpoint, options) for checkpoint in options.checkpoints]
    found: dict[tuple[str, str, str], list[Row]] = {}
    for seed in range(options.seeds):
        for subject in subjects:
            for width in WIDTHS:
                for way in WAYS:
                    asked = {**asdict(subject.size), "model": subject.name, "known": subject.known.name}
                    asked |= {"width": width, "way": way, "seed": seed}
                    row = runs.get(asked, partial(convert, subject, width, way, seed))
                    found.setdefault((subject.name, width, way), []).append(row)
                    print(f"seed {seed}, {subject.name}, {width}, {way}: {row}", flush=True)
            subject.patched.cache_clear()
    first = subjects[0]
    texts = {"known": first.known.name, "text": first.text.name, "model": first.name}
    results = study.by_rate_and_arm(
        options, runs, list(ARMS), {**asdict(first.size), **texts}, partial(train_on, first)
    )
    made = f"`{first.size}`, {options.seeds} seeds; {provenance(runs.used)}"
    lines = study.opening("Norms over all heads, and learned temperatures", __doc__, made)
    lines += ["## Conversion", "", *conversions(found), "## Training", "", *trainings(results)]
    return study.publish("\n".join(lines) + "\n", options.out)


if __name__ == "__main__":
    main()
