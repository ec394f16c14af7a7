"""Measure long context before and after a conversion: loss by position, and copying over a distance.

    python recipes/benchmarks/long_context.py --text ../shared/data/tinyshakespeare.txt --checkpoints \
        ../shared/checkpoints/llama-shakespeare ../shared/checkpoints/gpt2-shakespeare --jobs 2

Published work (OlmPool: Bertsch et al. 2026, 26 models of 7B) finds that three or four of QK norm, GQA, sliding windows
and a short pretraining context together cost up to 47 % of the scores on long-context benchmarks after the context is
extended, and that losses on short text do not show it. Here two models of 3 M parameters, trained on rows of 256 bytes
of Shakespeare, are measured up to 1,024 positions (Llama) and 512 (GPT-2, whose learned positions end there).

A third model is the Llama after lessons in copying: 1,500 steps of 16×64 tokens, random spans repeated
with periods of 4 to 24, then 600 of 4×256, text with a random span of 16 to 64 twice in every other row; AdamW at 1e-3,
bf16 autocast, seed 0. The other two do not copy, as the page shows.

Positions: the mean loss over stretches of positions of 64 rows of the last tenth of the text, the same for every arm. A
rise is the mean over rows of the difference from the unpatched model, ± its standard error. Copying: a span of 32
stands at the start of a row of held-out text, and again after a distance at its end; random characters of the text's
alphabet, shuffled text, or natural text. The result is the share of the second copy's characters, without the first 4,
that the model thinks most likely.

Arms: the scheme qk_norm_cap, calibrated on 128 rows of 256 from the first nine tenths of the text, by moments with
fixed knees and with the knee that `calibrate` finds; by `fit` (120 steps of 4×256) without a knee; knee 0 and the found
knee on the same number of tokens in rows of the longest length; and a cap alone.

Rules, fixed before the runs. An arm loses long context if its rise beyond the trained length is more than 0.01 nats
above its rise within it, and more than twice the standard error of that difference. A model copies if at the shortest
distance it predicts half of the second copy's characters right. An arm loses copying at a distance if its share of
right characters is more than 0.05 below the unpatched model's, and more than twice the standard error of that.

An interrupted measurement continues where it stopped. Writes a page, its runs and a plot.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from long_context_page import page
from long_context_plots import plot
from long_context_tasks import KINDS, Draw, Stage, copying, losses_by_position, mixed_rows, short_rows, train
from run_log import Row, Runs, provenance
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from hf_qknorm import calibrate, patch_model
from hf_qknorm.convert.text import load_text, sample_batches, tokenize
from hf_qknorm.files.atomic_io import new_folder, replace_text

TAUGHT = "taught to copy"


@dataclass(frozen=True)
class Arm:
    """A conversion: a scheme, its knee and method of calibration, and whether the text for it has the longest rows."""

    scheme: str = "qk_norm_cap"
    knee: float | str = 0.0
    method: str = "moments"
    longest: bool = False


ARMS = {
    "unpatched": Arm("none"),
    "a cap alone": Arm("soft_cap"),
    "knee 0": Arm(),
    "knee 2": Arm(knee=2.0),
    "knee 4": Arm(knee=4.0),
    "knee 8": Arm(knee=8.0),
    "found knee": Arm(knee="auto"),
    "`fit`, knee 0": Arm(method="fit"),
    "knee 0, longest rows": Arm(longest=True),
    "found knee, longest rows": Arm(knee="auto", longest=True),
}


@dataclass(frozen=True)
class Size:
    """The trained length, the amounts of text, and the lessons in copying."""

    length: int = 256
    rows: int = 64
    calibrated: int = 128
    steps: int = 120  # of `fit`
    span: int = 32
    tokens: int = 4096  # a distance
    short: Stage = Stage(1500, 16, 64)
    mixed: Stage = Stage(600, 4, 256)

    @property
    def edges(self) -> list[int]:
        """Where stretches of positions begin and end."""
        return [self.length * eighths // 8 for eighths in (0, 2, 4, 8, 12, 16, 24, 32)]

    @property
    def distances(self) -> list[int]:
        """From a span to its copy; with a distance of the trained length less the span, the row has that length."""
        parts = [self.length * quarters // 4 for quarters in (1, 2)]
        return parts + [self.length * part // 2 - self.span for part in (2, 3, 4, 6, 8)]


SIZES = {
    "quick": Size(length=32, rows=2, calibrated=8, steps=2, span=8, tokens=64, short=Stage(2, 4, 32),
                  mixed=Stage(2, 2, 64)),
    "full": Size(),
}  # fmt: skip


@dataclass
class Options:
    """The options of the measurement."""

    checkpoints: list[str]
    text: str
    size: str = field(default="full", metadata={"choices": list(SIZES)})
    jobs: int = 1
    minutes: float = math.inf
    taught: Path = Path("build/taught")  # folder for the model that is taught to copy
    out: Path = Path("recipes/results/long_context")


@dataclass(frozen=True)
class Source:
    """A checkpoint, its text, and how far it is measured."""

    name: str
    checkpoint: str
    text: str
    size: Size

    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.checkpoint, use_safetensors=True).eval()

    def tokens(self) -> tuple[Tensor, Tensor]:
        """The tokens of the first nine tenths of the text, and of the last."""
        tokenizer, characters = AutoTokenizer.from_pretrained(self.checkpoint), load_text(self.text)
        cut = int(len(characters) * 0.9)
        return tokenize(tokenizer, characters[:cut]), tokenize(tokenizer, characters[cut:])


def reach(model: Any, size: Size) -> int:
    """The longest row: four times the trained length, or the end of learned positions."""
    learned = getattr(model.config, "rope_parameters", None) is None
    return min(4 * size.length, model.config.max_position_embeddings) if learned else 4 * size.length


def convert(model: Any, arm: Arm, seen: Tensor, size: Size) -> None:
    """Patch and calibrate the model in place."""
    patch_model(model, arm.scheme)
    if not model.config.scheme.norms:
        return
    length = reach(model, size) if arm.longest else size.length
    batches = sample_batches(seen, size.calibrated // 4, 4, size.length, seed=1)
    if arm.longest:
        count = size.calibrated * size.length // length
        batches = sample_batches(seen, count, 1, length, seed=1)
    calibrate(model, batches, arm.method, knee=arm.knee, max_tokens=2**20, steps=size.steps)  # type: ignore[arg-type]


def measure(model: Any, held_out: Tensor, source: Source) -> Row:
    """The losses by position, and the copying by kind and distance; all kinds for the unpatched model."""
    size, longest = source.size, reach(model, source.size)
    edges = [edge for edge in size.edges if edge <= longest]
    starts = torch.linspace(0, len(held_out) - longest, size.rows).long().tolist()
    rows = torch.stack([held_out[start : start + longest] for start in starts])
    kinds = KINDS if not model.config.scheme.norms and model.config.scheme.softcap is None else KINDS[:1]
    copied: dict[str, Row] = {}
    for kind in kinds:
        distances = [distance for distance in size.distances if distance + size.span <= longest]
        found = {str(d): copying(model, Draw(held_out, d), kind, d, size.span, size.tokens) for d in distances}
        copied[kind] = found
    return {"knee": model.config.scheme.knee, "edges": edges, "losses": losses_by_position(model, rows, edges),
            "copying": copied}  # fmt: skip


def run_one(sources: dict[str, Source], settings: Row) -> Row:
    """Convert a model by an arm and measure it."""
    logging.getLogger("hf_qknorm").setLevel(logging.ERROR)
    torch.manual_seed(0)
    source = sources[settings["model"]]
    model = source.model()
    seen, held_out = source.tokens()
    convert(model, ARMS[settings["arm"]], seen, source.size)
    return measure(model.eval(), held_out, source)


def teach(source: Source, folder: Path) -> None:
    """Write a copy of the model, taught to copy, to `folder`."""
    torch.manual_seed(0)
    model, tokenizer = source.model(), AutoTokenizer.from_pretrained(source.checkpoint)
    draw, size = Draw(source.tokens()[0], seed=0), source.size
    for stage, rows in ((size.short, short_rows), (size.mixed, mixed_rows)):
        for step, loss in enumerate(train(model, draw, stage, rows), start=1):
            if step % 100 == 0:
                print(f"lessons of {stage.length} tokens, step {step}: {loss:.3f}", flush=True)
    with new_folder(folder, lambda: None) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)


def all_sources(options: Options) -> dict[str, Source]:
    """The checkpoints by name, and the first with RoPE again, taught to copy; that model is made if it is missing."""
    size = SIZES[options.size]
    sources = {Path(at).name: Source(Path(at).name, at, options.text, size) for at in options.checkpoints}
    rotary = next(source for source in sources.values() if hasattr(source.model().config, "rope_parameters"))
    folder = options.taught / rotary.name
    if not folder.exists():
        teach(rotary, folder)
    name = f"{rotary.name}, {TAUGHT}"
    return {**sources, name: Source(name, str(folder), options.text, size)}


def main(arguments: list[str] | None = None) -> str:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses(arguments)
    torch.set_num_threads(1)
    size, sources = SIZES[options.size], all_sources(options)
    runs = Runs(options.out.with_suffix(".jsonl"))
    wanted = [{"model": name, "arm": arm, **asdict(size)} for name in sources for arm in ARMS]
    runs.run_all(wanted, partial(run_one, sources), options.jobs, options.minutes)
    known = [row["settings"] for row in runs.rows]
    sections: dict[str, dict[str, Row]] = {}
    for settings in wanted:
        if settings in known:
            sections.setdefault(settings["model"], {})[settings["arm"]] = runs.get(settings, dict)
    plotted = options.out.with_suffix(".png")
    plot(sections, size.length, plotted)
    description = (__doc__ or "").partition("--jobs 2\n\n")[2].rpartition("\n\n")[0]
    text = page(sections, size.length, description, provenance(runs.used), plotted.name)
    replace_text(options.out.with_suffix(".md"), text)
    print(text)
    return text


if __name__ == "__main__":
    main()
