"""What a conversion keeps of a real model's predictions, and the bound that it sets on the logits.

    python recipes/benchmarks/real.py --model "$(python recipes/real_model.py)" --text wikitext2-valid.txt \
        --others tinyshakespeare.txt

The model is calibrated on 20 sequences of 512 tokens from the first nine tenths of a text, and compared with the
unpatched model on 6 sequences of 512 tokens of the last tenth ("held-out"), of sources of Python, of the held-out
lines as a chat, and of each other text. "rise" is that of the loss, "KL" the divergence from the unpatched model in the
same dtype, both in nats per token; "bound" is the largest |logit| that any input can have, "own" the unpatched model's
largest on the held-out sequences. The first rows are the default call with each scheme, the others fixed knees.

Each finished way is a line of `out`.jsonl, and an interrupted run continues. Writes a page and a plot.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from page import provenance, publish, table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from hf_qknorm import calibrate, logit_statistics, patch_model
from hf_qknorm.measure.bounds import worst_bound
from hf_qknorm.measure.predictions import predictions
from hf_qknorm.measure.text import cut, load_text, tokenize
from hf_qknorm.model.knees import knee_of
from hf_qknorm.plots import INK, finish_axes, new_figure, save_figure

LENGTH, CALIBRATED, JUDGED = 512, 20, 6
Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A conversion: the scheme, knee and sharpness if they are not the default, and the dtype of the weights."""

    scheme: str
    knee: float | None = None
    dtype: torch.dtype = torch.float32
    sharpness: float | None = None


KNEES = {f"qk_norm, knee {k:g}": Way("qk_norm", k, sharpness=8.0) for k in (0.5, 1, 1.4, 2, 4)}
DEFAULTS = ("qk_norm", "qk_norm_cap")
WAYS = {
    **{name: Way(name) for name in (*DEFAULTS, "qkv_norm", "q_norm", "soft_cap", "henry", "lp")},
    **KNEES,
    "qk_norm, knee 16, sharpness 1": Way("qk_norm", 16.0),
    "qk_norm, bf16": Way("qk_norm", None, torch.bfloat16),
    "qk_norm_cap, bf16": Way("qk_norm_cap", None, torch.bfloat16),
}


@dataclass(kw_only=True)
class Options:
    """The options of the comparison: the model, the texts, and the page without its ending."""

    model: str
    text: str
    others: list[str] = field(default_factory=list)
    out: Path = Path("real")


class Comparison:
    """A real model, its conversions, and what they keep."""

    def __init__(self, options: Options) -> None:
        self.model, self.tokenizer = options.model, AutoTokenizer.from_pretrained(options.model)
        text = load_text(options.text)
        self.known, held_out = text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :]
        texts = {"held-out": held_out, "Python": load_text(None, limit=100_000)}
        if self.tokenizer.chat_template:
            lines = [line.strip() for line in held_out.splitlines() if line.strip()]
            turns = zip(("user", "assistant") * (len(lines) // 2), lines, strict=False)
            chat = [{"role": role, "content": line} for role, line in turns]
            texts["chat"] = self.tokenizer.apply_chat_template(chat, tokenize=False)
        texts |= {Path(other).stem: load_text(other, limit=100_000) for other in options.others}
        self.judging = {name: self.sequences(text, JUDGED) for name, text in texts.items()}

    def sequences(self, text: str, rows: int) -> list[dict[str, Tensor]]:
        return cut(tokenize(self.tokenizer, text[: 20 * rows * LENGTH])[: rows * LENGTH], 1, LENGTH)

    def kept(self, name: str) -> Row:
        """The knee, the bound, and rise, KL and agreement on each text."""
        way = WAYS[name]
        model: Any = patch_model(AutoModelForCausalLM.from_pretrained(self.model, dtype=way.dtype).eval(), way.scheme)
        if model.config.scheme.norms:
            calibrate(model, self.sequences(self.known, CALIBRATED), knee=way.knee, sharpness=way.sharpness)
        found: Row = {"knee": round(knee_of(model), 2), "bound": round(worst_bound(model) or 0.0, 1), "texts": {}}
        for text, batches in self.judging.items():
            base, own = predictions(model, batches)
            rise, same = own.loss - base.loss, own.agreement or 0.0
            found["texts"][text] = {"rise": round(rise, 5), "kl": round(own.kl, 5), "same": round(same, 5)}
        return found

    @torch.no_grad()
    def own_logit(self) -> Row:
        """The unpatched model's largest |logit|."""
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()
        with logit_statistics(model) as seen:
            for batch in self.judging["held-out"]:
                model(**batch, use_cache=False)
        return {"logit": round(max(float(layer.max_logit.max()) for layer in seen.values()), 1)}


def kept_section(rows: dict[str, Row], logit: float, plot: Path) -> list[str]:
    texts = [*rows["qk_norm"]["texts"]]
    head = ["way", "knee", "bound", "rise", *(f"KL, {text}" for text in texts), "same top token"]
    cells = []
    for name, row in rows.items():
        held_out, kls = row["texts"]["held-out"], [f"{row['texts'][text]['kl']:.4f}" for text in texts]
        bound = f"{row['bound']:.0f}" if row["bound"] else ""
        cells.append([name, f"{row['knee']:g}", bound, f"{held_out['rise']:+.4f}", *kls, f"{held_out['same']:.1%}"])
    draw_kept([row for name, row in rows.items() if name == "qk_norm" or name in KNEES], plot)
    shown = f"![KL and rise in loss over the bound on the logits]({plot.name})"
    return [f"Own: {logit:g}.", "", *table(head, cells), shown, ""]


def draw_kept(rows: list[Row], path: Path) -> None:
    """Plot the KL on each text, and the rise in loss on the held-out one, over the bound."""
    rows, least = sorted(rows, key=lambda row: row["bound"]), 1e-5  # the logs have five digits
    bounds = [row["bound"] for row in rows]
    figure = new_figure(7.5, 4.0)
    axes = figure.subplots()
    for text in rows[0]["texts"]:
        values = [max(row["texts"][text]["kl"], least) for row in rows]
        axes.plot(bounds, values, marker="o", markersize=5, label=f"KL, {text}")
    rises = [max(row["texts"]["held-out"]["rise"], least) for row in rows]
    axes.plot(bounds, rises, color=INK, linestyle="--", marker="o", markersize=5, label="rise in loss, held-out")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(bounds, [f"{row['bound']:.0f}\n{row['knee']:g}" for row in rows])
    axes.minorticks_off()
    finish_axes(axes, "largest |logit| that any input can have; below it, the knee", "nats per token")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=9, labelcolor=INK)
    save_figure(figure, path)


def main(command: list[str] | None = None) -> str:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses(command)
    torch.set_num_threads(1)
    comparison, log = Comparison(options), options.out.with_suffix(".jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done: dict[str, Row] = {line.pop("way"): line for line in lines}
    for name in ("own", *WAYS):
        if name not in done:
            done[name] = comparison.own_logit() if name == "own" else comparison.kept(name)
            with log.open("a") as file:
                file.write(json.dumps({"way": name} | done[name]) + "\n")
            print(name, flush=True)
    own = done.pop("own")["logit"]
    lines = kept_section({name: done[name] for name in WAYS}, own, options.out.with_suffix(".png"))
    return publish(f"A real model: {Path(options.model).name}", __doc__, provenance(), lines, options.out)


if __name__ == "__main__":
    main()
