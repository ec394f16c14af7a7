"""What a conversion to sharp norms keeps, on texts that the calibration does not see.

    python recipes/benchmarks/sharp_norms.py --others tinyshakespeare.txt wikitext2-test.txt \
        --models llama-shakespeare=tinyshakespeare.txt gpt2-shakespeare=tinyshakespeare.txt smollm2=wikitext2-valid.txt

Each model is calibrated on 20 sequences of 512 tokens from the first nine tenths of its text, and compared with the
unpatched model on 6 sequences of the last tenth, and of each other text: the `--others` but its own, sources of Python,
and, where the tokenizer has a template for chats, the lines of the last tenth as one. "rise" is that of the loss, "KL"
the divergence from the unpatched model, both in nats per token; "bound" is the largest |logit| that any input can have.

"default" is `calibrate(model, data)`, which searches the knee, for `qk_norm` and `qk_norm_cap`. The rise at long
positions is the worst mean over 256 positions of 4 sequences of up to 2,048 tokens. "removed" is the loss without
norms, by `remove_norms` at once, less the unpatched model's.

The rule was fixed before the runs. The default keeps its promise on a model if `qk_norm` and `qk_norm_cap` raise the
held-out loss by at most 0.003 nats at a KL of at most 0.004, the KL is at most 0.005 on other texts, the worst 256
positions rise by at most 0.01, and the removal costs at most 0.002. Writes a page and its runs; prints Markdown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from page import opening, publish, table
from run_log import Row, parse, provenance
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import ModelOutput

from hf_qknorm import calibrate, patch_model, remove_norms
from hf_qknorm.measure.bounds import worst_bound
from hf_qknorm.measure.predictions import loss_of, predictions
from hf_qknorm.measure.text import context_length, load_text, tokenize
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.model.knees import knee_of

DEFAULTS = ("qk_norm", "qk_norm_cap")
LENGTH, LONG, WINDOW, CALIBRATED, JUDGED = 512, 2048, 256, 20, 6
PROMISE = {"rise": 0.003, "kl": 0.004, "others": 0.005, "long": 0.01, "removed": 0.002}


@dataclass(kw_only=True)
class Options:
    """The options of the comparison: models as CHECKPOINT=TEXT, other texts, size, and files without their endings."""

    models: list[str]
    others: list[str] = field(default_factory=list)
    size: str = field(default="full", metadata={"choices": ["quick", "full"]})
    out: Path = Path("recipes/results/data/sharp_norms_v1")


class Story:
    """A trained model, its calibration text, and the texts that judge."""

    def __init__(self, given: str, others: list[str], size: str) -> None:
        self.checkpoint, _, self.source = given.rpartition("=")
        self.name, self.rows = Path(self.checkpoint).name, JUDGED if size == "full" else 1
        self.others = [other for other in others if Path(other).name != Path(self.source).name]
        self.kept: dict[str, list[ModelOutput]] = {}

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.checkpoint)

    @cached_property
    def judging(self) -> dict[str, list[dict[str, Tensor]]]:
        """The sequences of each text, one to a batch; the first text is held out from the calibration's."""
        text = load_text(self.source)
        held_out = text[int(len(text) * 0.9) :]
        texts = {"held-out": held_out, "Python": load_text(None, limit=100_000)}
        if self.tokenizer.chat_template:
            turns = [line.strip() for line in held_out.splitlines() if line.strip()]
            roles = ("user", "assistant")
            chat = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns[: len(turns) // 2 * 2])]
            texts["chat"] = self.tokenizer.apply_chat_template(chat, tokenize=False)
        texts |= {Path(other).stem: load_text(other, limit=100_000) for other in self.others}
        return {name: self.sequences(text, self.rows) for name, text in texts.items()}

    def sequences(self, text: str, rows: int, length: int = LENGTH) -> list[dict[str, Tensor]]:
        ids = tokenize(self.tokenizer, text[: 20 * rows * length])[: rows * length]
        return [{"input_ids": row[None]} for row in ids[: len(ids) // length * length].view(-1, length)]

    def run(self, scheme: str) -> Row:
        """The model with the scheme, calibrated by the default call, beside the unpatched one."""
        model: Any = patch_model(AutoModelForCausalLM.from_pretrained(self.checkpoint).eval(), scheme)
        text = load_text(self.source)
        calibrate(model, self.sequences(text[: int(len(text) * 0.9)], CALIBRATED))
        row = self.compared(model) | {"knee": round(knee_of(model), 2), "long": round(self.worst_positions(model), 5)}
        if scheme == "qk_norm":
            held_out = self.judging["held-out"]
            with as_unpatched(model):
                base = loss_of(model, held_out)
            row["removed"] = round(loss_of(remove_norms(model, held_out), held_out) - base, 5)
        return row

    def compared(self, model: Any) -> Row:
        """The model's bound, and its rise, KL and agreement on each text."""
        found: Row = {"bound": round(worst_bound(model) or 0.0, 1), "texts": {}}
        for name, batches in self.judging.items():
            base, own = predictions(model, batches, self.kept.setdefault(name, []))
            found["texts"][name] = {
                "rise": round(own.loss - base.loss, 5), "kl": round(own.kl, 5), "same": round(own.agreement or 0.0, 4)
            }  # fmt: skip
        return found

    @torch.no_grad()
    def worst_positions(self, model: Any) -> float:
        """The largest mean rise in loss over `WINDOW` positions of long sequences."""
        length = min(LONG, context_length(model.config) or LONG)
        text, rises = load_text(self.source), []
        for batch in self.sequences(text[int(len(text) * 0.9) :], 4 if self.rows > 1 else 1, length):
            own = losses_of(model, batch["input_ids"])
            with as_unpatched(model):
                rises.append(own - losses_of(model, batch["input_ids"]))
        return max(float(part.mean()) for part in torch.stack(rises).mean(0).split(WINDOW) if len(part) > WINDOW // 2)


def losses_of(model: Any, ids: Tensor) -> Tensor:
    """The loss at each position `[T − 1]`."""
    logits = model(ids, use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), ids[0, 1:], reduction="none")


def broken(row: Row) -> list[str]:
    """The parts of the promise that a default conversion breaks."""
    held_out = row["texts"]["held-out"]
    others = max((text["kl"] for name, text in row["texts"].items() if name != "held-out"), default=0.0)
    found = {"rise": held_out["rise"], "kl": held_out["kl"], "others": others, "long": row["long"]}
    found["removed"] = row.get("removed", 0.0)
    return [f"{name} {value:.4f}" for name, value in found.items() if value > PROMISE[name]]


def page(defaults: dict[str, dict[str, Row]], made: str) -> list[str]:
    """The comparison as Markdown."""
    lines = opening("Sharp norms", __doc__, made)
    for name, rows in defaults.items():
        texts = [*rows["qk_norm"]["texts"]]
        head = [name, "knee", "bound", "rise", *(f"KL, {text}" for text in texts), "same top token", "long", "removed"]
        cells = []
        for scheme, row in rows.items():
            held_out, kls = row["texts"]["held-out"], [f"{row['texts'][text]['kl']:.4f}" for text in texts]
            first = [scheme, f"{row['knee']:g}", f"{row['bound']:.1f}", f"{held_out['rise']:+.4f}", *kls]
            removed = f"{row['removed']:+.4f}" if "removed" in row else ""
            cells.append([*first, f"{held_out['same']:.1%}", f"{row['long']:+.4f}", removed])
        lines += table(head, cells)
        faults = [f"{scheme}: {', '.join(found)}" for scheme, row in rows.items() if (found := broken(row))]
        lines += [f"It {'breaks' if faults else 'keeps'} the promise{': ' * bool(faults)}{'; '.join(faults)}.", ""]
    return lines


def main(command: list[str] | None = None) -> str:
    options, runs = parse(Options, command)
    defaults: dict[str, dict[str, Row]] = {}
    for given in options.models:
        story = Story(given, options.others, options.size)
        settings = {"model": story.name, "text": Path(story.source).name, "size": options.size}
        rows = defaults[story.name] = {}
        for scheme in DEFAULTS:
            rows[scheme] = runs.get(settings | {"scheme": scheme}, partial(story.run, scheme))
            print(settings | {"scheme": scheme}, rows[scheme], flush=True)
    return publish(page(defaults, provenance(runs.used)), options.out)


if __name__ == "__main__":
    main()
