"""What a conversion keeps of a real model: its predictions at all positions, its text, and its answers.

    python recipes/benchmarks/real.py --model "$(python recipes/real_model.py)" --text wikitext2-valid.txt \
        --test wikitext2-test.txt --others tinyshakespeare.txt

The model is calibrated on 20 sequences of 512 tokens from the first nine tenths of a text, and compared with the
unpatched model on 6 sequences of 512 tokens of the last tenth ("held-out"), of sources of Python, of the held-out
lines as a chat, and of each other text. "rise" is that of the loss, "KL" the divergence from the unpatched model in the
same dtype, both in nats per token; "bound" is the largest |logit| that any input can have. The first rows are the
default call with each scheme of README, the others fixed knees.

- Positions: the mean rise over 2 sequences of the test text as long as the context, calibrated on 512 tokens as above.
- Text: of greedy continuations of 64 tokens after 100 prompts of 32 tokens of the test text, the number of tokens that
  are the unpatched model's, up to the first other one. The unpatched model in bf16 is the yardstick.
- Answers: two tasks made from the test text, by lm-eval's own command on a saved checkpoint with its own code. "cloze"
  asks for the last word of a passage, "continuation" for the next words, one of four. "other" counts the questions with
  another outcome than the unpatched model's.

The largest |logit| of the unpatched model is over the held-out sequences. An interrupted run continues. Writes a page
and its runs; prints Markdown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from local_tasks import TASKS, answers, write_tasks
from markdown_table import opening, publish, table
from real_plot import plot_kept
from run_log import Row, Runs, parse, provenance
from sharp_norms import Story, losses_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_qknorm import Scheme, calibrate, logit_statistics, patch_model
from hf_qknorm.measure.text import context_length, load_text
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.model.knees import knee_of
from hf_qknorm.standalone.generate import add_standalone

CALIBRATED, LONG_ROWS, PROMPT, NEW, BATCH = 20, 2, 32, 64, 25
EDGES = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Way:
    """A conversion: the scheme, knee and sharpness if they are not the default, and the dtype of the weights."""

    scheme: str | Scheme | None  # None: the unpatched model
    knee: float | None = None
    dtype: torch.dtype = torch.float32
    sharpness: float | None = None


KNEES = {f"qk_norm, knee {k:g}": Way("qk_norm", k, sharpness=8.0) for k in (0.5, 1, 1.4, 2, 4)}
SCHEMES = ("qk_norm", "qk_norm_cap", "qkv_norm", "q_norm", "soft_cap", "henry", "lp")
WAYS = {
    **{name: Way(name) for name in SCHEMES},
    **KNEES,
    "qk_norm, knee 16, sharpness 1": Way("qk_norm", 16.0),
    "qk_norm, bf16": Way("qk_norm", None, torch.bfloat16),
    "qk_norm_cap, bf16": Way("qk_norm_cap", None, torch.bfloat16),
    "unpatched": Way(None),
    "unpatched, bf16": Way(None, None, torch.bfloat16),
}
PARTS = ("kept", "positions", "text", "answers")
DEFAULTS, LOW = ("qk_norm", "qk_norm_cap"), "qk_norm, knee 1"


@dataclass(kw_only=True)
class Options:
    """The options of the comparison: the model, the texts, and the page without its ending."""

    model: str
    text: str
    test: str
    others: list[str] = field(default_factory=list)
    size: str = field(default="full", metadata={"choices": ["quick", "full"]})
    parts: list[str] = field(default_factory=lambda: list(PARTS), metadata={"choices": PARTS})
    out: Path = Path("recipes/results/real")


class Comparison(Story):
    """A real model, its conversions, and what they keep."""

    def __init__(self, options: Options) -> None:
        super().__init__(f"{options.model}={options.text}", options.others, options.size)
        self.test, self.full = load_text(options.test), options.size == "full"
        self.greedy: dict[str, Tensor] = {}
        self.dtype = torch.float32  # of the unpatched model's outputs that are kept

    def model(self, name: str) -> Any:
        """The model converted in the way of this name."""
        way = WAYS[name]
        model: Any = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=way.dtype).eval()
        if way.scheme is None:
            return model
        patch_model(model, way.scheme)
        if model.config.scheme.norms:
            text = load_text(self.source)
            data = self.sequences(text[: int(len(text) * 0.9)], CALIBRATED if self.full else 4)
            calibrate(model, data, knee=way.knee, sharpness=way.sharpness)
        return model

    def kept_by(self, name: str) -> Row:
        """The knee, the bound, and rise, KL and agreement on each text."""
        model = self.model(name)
        if model.dtype != self.dtype:
            self.kept, self.dtype = {}, model.dtype
        return self.compared(model) | {"knee": round(knee_of(model), 2)}

    def own_logit(self) -> Row:
        with logit_statistics(model := self.model("unpatched")) as seen, torch.no_grad():
            for batch in self.judging["held-out"]:
                model(**batch, use_cache=False)
        return {"logit": round(max(float(layer.max_logit.max()) for layer in seen.values()), 1)}

    @torch.no_grad()
    def by_position(self, name: str) -> Row:
        """The mean rise up to each of `EDGES`, from the one before."""
        model = self.model(name)
        length, rises = min(EDGES[-1], context_length(model.config) or EDGES[-1]), []
        for batch in self.sequences(self.test, LONG_ROWS if self.full else 1, length):
            own = losses_of(model, batch["input_ids"])
            with as_unpatched(model):
                rises.append(own - losses_of(model, batch["input_ids"]))
        rise = torch.stack(rises).mean(0)
        starts = {end: start for start, end in pairwise((0, *EDGES)) if start < len(rise)}
        return {str(end): round(float(rise[start:end].mean()), 5) for end, start in starts.items()}

    @torch.no_grad()
    def continuations(self, name: str) -> Tensor:
        """The greedy continuations `[prompts, NEW]`."""
        if name not in self.greedy:
            model, count = self.model(name), 4 * BATCH if self.full else 2
            ids = torch.cat([batch["input_ids"] for batch in self.sequences(self.test, count, 4 * PROMPT)])[:, :PROMPT]
            fixed = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW, "pad_token_id": 0}
            found = [model.generate(x, attention_mask=torch.ones_like(x), **fixed) for x in ids.split(BATCH)]
            self.greedy[name] = torch.cat(found)[:, PROMPT:]
        return self.greedy[name]

    def same_text(self, name: str) -> Row:
        same = self.continuations(name) == self.continuations("unpatched")
        return {"same": same.long().cumprod(1).sum(1).tolist()}

    def answered(self, name: str) -> Row:
        """Whether each answer is right, by task."""
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_tasks(self.test, folder / "tasks", 200 if self.full else 4)
            if WAYS[name].scheme is None:
                return dict(answers(self.checkpoint, folder / "tasks", folder / "out"))
            self.model(name).save_pretrained(folder / "model")
            self.tokenizer.save_pretrained(folder / "model")
            add_standalone(folder / "model")
            return dict(answers(folder / "model", folder / "tasks", folder / "out"))


def kept_section(rows: dict[str, Row], logit: float, plot: Path) -> list[str]:
    texts = [*rows["qk_norm"]["texts"]]
    head = ["way", "knee", "bound", "rise", *(f"KL, {text}" for text in texts), "same top token"]
    cells = []
    for name, row in rows.items():
        held_out, kls = row["texts"]["held-out"], [f"{row['texts'][text]['kl']:.4f}" for text in texts]
        bound = f"{row['bound']:.0f}" if row["bound"] else ""
        cells.append([name, f"{row['knee']:g}", bound, f"{held_out['rise']:+.4f}", *kls, f"{held_out['same']:.1%}"])
    lead = f"The largest |logit| of the unpatched model on the held-out sequences is {logit:g}."
    sharp = [row for name, row in rows.items() if name == "qk_norm" or name in KNEES]
    plot_kept(sharp, logit, plot)
    shown = f"![KL and rise in loss over the bound on the logits]({plot.name})"
    return ["## Predictions", "", lead, "", *table(head, cells), "`qk_norm`, by knee:", "", shown, ""]


def positions_section(rows: dict[str, Row]) -> list[str]:
    head = ["rise at positions up to", *next(iter(rows.values()))]
    return [
        "## Positions",
        "",
        *table(head, [[name, *(f"{x:+.4f}" for x in row.values())] for name, row in rows.items()]),
    ]


def text_section(rows: dict[str, Row]) -> list[str]:
    cells = []
    for name, row in rows.items():
        same = row["same"]
        whole = sum(count == NEW for count in same)
        cells.append([name, f"{statistics.median(same):g}", f"{statistics.fmean(same):.1f}", f"{whole} of {len(same)}"])
    return ["## Text", "", *table(["way", f"same tokens of {NEW}, median", "mean", "all the same"], cells)]


def answers_section(rows: dict[str, Row]) -> list[str]:
    base, cells = rows["unpatched"], []
    for name, row in rows.items():
        cell = [name]
        for task in TASKS:
            right, n = sum(row[task]), len(row[task])
            share = right / n
            other = sum(one != two for one, two in zip(row[task], base[task], strict=True))
            cell += [f"{share:.1%} ± {math.sqrt(share * (1 - share) / n):.1%}", f"{other} of {n}"]
        cells.append(cell)
    head = ["way", *(label for task in TASKS for label in (f"{task}, right ± standard error", "other"))]
    return ["## Answers", "", *table(head, cells)]


def main(command: list[str] | None = None) -> str:
    options, runs = parse(Options, command)
    story = Comparison(options)
    settings = {"model": story.name, "text": Path(options.text).name, "test": Path(options.test).name,
                "size": options.size}  # fmt: skip

    def rows(part: str, names: tuple[str, ...], run: Callable[[str], Row]) -> dict[str, Row]:
        return {name: _get(runs, {**settings, "part": part, "way": name}, partial(run, name)) for name in names}

    logit = _get(runs, {**settings, "part": "own logit"}, story.own_logit)["logit"]
    patched = tuple(name for name, way in WAYS.items() if way.scheme is not None)
    made: dict[str, Callable[[], list[str]]] = {
        "kept": lambda: kept_section(rows("kept", patched, story.kept_by), logit, options.out.with_suffix(".png")),
        "positions": lambda: positions_section(rows("positions", DEFAULTS, story.by_position)),
        "text": lambda: text_section(rows("text", (*DEFAULTS, LOW, "unpatched, bf16"), story.same_text)),
        "answers": lambda: answers_section(rows("answers", ("unpatched", *DEFAULTS, LOW), story.answered)),
    }
    sections = [made[part]() for part in PARTS if part in options.parts]
    lines = opening(f"A real model: {story.name}", __doc__, provenance(runs.used))
    return publish("\n".join([*lines, *(line for section in sections for line in section)]), options.out)


def _get(runs: Runs, settings: Row, run: Callable[[], Row]) -> Row:
    row = runs.get(settings, run)
    print(settings, {key: row[key] for key in list(row)[:3]}, flush=True)
    return row


if __name__ == "__main__":
    main()
