"""Are gains in closed form as good as trained gains, and gains that heads share as gains per head?

    python recipes/benchmarks/gain_methods.py --models llama-shakespeare=tinyshakespeare.txt \\
        gpt2-shakespeare=tinyshakespeare.txt SmolLM2-135M-Instruct=wikitext2-valid.txt

Each model gets RMSNorm on queries and keys, calibrated on the start of its text, and is compared with the unpatched
model on the start of the last tenth: the rise in loss and the KL from the unpatched model, in nats per token. "bound"
is the largest |logit| that any input can have. Small models are calibrated on 128 sequences of 512 tokens, in batches
of 2, and judged on 24; one of more than 50 million parameters on 20, in batches of 1, and on 6. There `fit` and
`fit_qk` take 40 steps at most, on small models 120.

- "default": the sharp knee that `calibrate(model, data)` finds. Its gains in closed form (`moments`) are the same for
  all heads and channels of a layer, so "per head" can only repeat them.
- "plain": norms without a knee.
- "knee 8" to "knee 32": a sharpness of 1, which an export to Qwen 3 can keep exactly by smaller projections.

The rules were fixed before the runs; each comparison is of KLs.

- `fit` goes if on every model the default's KL by `moments` is at most 0.001 above that by `fit`, and for exports the
  lowest KL of the knees 8 to 32 by `moments` is below that of the plain norms by `fit`. Where the default's KL by
  `moments` is at most 0.001, `fit` cannot lower it by more, and is not run on the large model.
- `fit_qk` goes if the same holds with the plain norms by `fit_qk` on both sides. Its KL is from the predictions of the
  model before its projections changed.
- Gains per head stop being recommended, at the default and at plain norms each, unless they lower the KL by more than
  0.001 on two models or more.

A knee always costs less and bounds less: the comparison for exports says which conversion keeps the model, not which
one bounds its logits. An interrupted comparison continues where it stopped. Writes a page and its runs; prints
Markdown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import study
import torch
from knee_schedule import LARGE
from markdown_table import table
from run_log import Row, Runs, provenance
from sharp_norms import Story
from transformers import AutoModelForCausalLM

from hf_qknorm import Scheme, calibrate, patch_model
from hf_qknorm.convert.text import load_text
from hf_qknorm.stats.bounds import worst_bound
from hf_qknorm.stats.measure import predictions

LIMIT = 0.001  # nats of KL
EXPORTED: Final = ("knee 8", "knee 16", "knee 32")
# The gain of the scheme, and method and knee of the calibration.
ARMS: Final[dict[str, tuple[str, str, float | str]]] = {
    "default": ("shared", "moments", "auto"),
    "knee 8": ("shared", "moments", 8.0),
    "knee 16": ("shared", "moments", 16.0),
    "knee 32": ("shared", "moments", 32.0),
    "plain": ("shared", "moments", 0.0),
    "plain, per head": ("per_head", "moments", 0.0),
    "plain, fit": ("shared", "fit", 0.0),
    "default, fit": ("shared", "fit", "auto"),
    "plain, fit_qk": ("shared", "fit_qk", 0.0),
    "default, per head": ("per_head", "moments", "auto"),
}


@dataclass(frozen=True)
class Size:
    """The sequences that calibrate, of which `batch` make a batch, those that judge, and the most steps of a fit."""

    calibrated: int
    batch: int
    judged: int
    steps: int


SIZES = {"quick": Size(2, 1, 1, 1), "small": Size(128, 2, 24, 120), "large": Size(20, 1, 6, 40)}


@dataclass(kw_only=True)
class Options:
    """The options of the comparison: models as CHECKPOINT=TEXT, the size, and the files without their endings."""

    models: list[str]
    size: str = field(default="full", metadata={"choices": ["quick", "full"]})
    out: Path = Path("recipes/results/gain_methods")


class Converted(Story):
    """A trained model, and the text that calibrates and judges it."""

    def __init__(self, given: str, size: str) -> None:
        super().__init__(given, [], size)
        self.model: Any = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32)
        self.large = self.model.num_parameters() > LARGE
        self.size = SIZES["quick" if size == "quick" else "large" if self.large else "small"]
        self.rows = self.size.judged

    def run(self, arm: str) -> Row:  # type: ignore[override]
        """Calibrate the model in one way, and compare it with the unpatched one."""
        (gain, method, knee), size = ARMS[arm], self.size
        model: Any = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32).eval()
        patch_model(model, Scheme(q="rms", k="rms", gain=gain))
        text = load_text(self.source)
        sequences = [batch["input_ids"] for batch in self.sequences(text[: int(len(text) * 0.9)], size.calibrated)]
        batches = [{"input_ids": rows} for rows in torch.cat(sequences).split(size.batch)]
        if not self.kept:  # before any method has changed the projections of a model
            predictions(model, self.judging["held-out"], self.kept.setdefault("held-out", []))
        calibrate(model, batches, method, knee=knee, steps=size.steps)
        base, own = predictions(model, self.judging["held-out"], self.kept["held-out"])
        assert base is not None
        assert own is not None
        scheme = model.config.scheme
        found: Row = {"rise": round(own.loss - base.loss, 5), "kl": round(own.kl, 5), "knee": scheme.knee}
        return found | {"same": round(own.agreement or 0.0, 4), "bound": round(worst_bound(model) or 0.0, 1)}


def compare(converted: Converted, runs: Runs) -> dict[str, Row]:
    """The results of a model by arm."""
    results: dict[str, Row] = {}
    for arm in ARMS:
        if arm == "default, fit" and converted.large and results["default"]["kl"] <= LIMIT:
            continue
        settings = {"model": converted.name, "text": Path(converted.source).name, "arm": arm, **vars(converted.size)}
        results[arm] = runs.get(settings, partial(converted.run, arm))
        print(converted.name, arm, results[arm], flush=True)
    return results


def trained(results: dict[str, dict[str, Row]], sharp: str, plain: str) -> list[str]:
    """The models, with their KLs, on which trained gains are better: at the default, and for exports."""
    found = []
    for name, rows in results.items():
        kls = {arm: row["kl"] for arm, row in rows.items()}
        if sharp in kls and kls["default"] > kls[sharp] + LIMIT:
            found.append(f"{name}, default: {kls['default']:.4f} by `moments`, {kls[sharp]:.4f} by {sharp}")
        if (least := min(kls[arm] for arm in EXPORTED)) >= kls[plain]:
            found.append(f"{name}, exports: {least:.4f} with a knee, {kls[plain]:.4f} by {plain}")
    return found


def per_head(results: dict[str, dict[str, Row]], arm: str) -> list[str]:
    """The models on which gains per head lower the KL of an arm."""
    return [name for name, rows in results.items() if rows[arm]["kl"] - rows[f"{arm}, per head"]["kl"] > LIMIT]


def verdicts(results: dict[str, dict[str, Row]]) -> list[str]:
    """What follows from the rules, each as a sentence."""
    found = []
    for method, sharp in (("fit", "default, fit"), ("fit_qk", "plain, fit_qk")):
        better = trained(results, sharp, f"plain, {method}")
        found.append(f"By the rule `{method}` " + (f"stays: {'; '.join(better)}." if better else "goes."))
    for arm in ("default", "plain"):
        better = per_head(results, arm)
        ends = "stay recommended" if len(better) >= 2 else "stop being recommended"
        found.append(f'Gains per head, "{arm}": lower by more than {LIMIT} on {len(better)} models; they {ends}.')
    return found


def page(results: dict[str, dict[str, Row]], made: str) -> str:
    """The comparison as Markdown, the verdicts first."""
    lines = study.opening("Methods for gains", __doc__, made)
    lines += [*(f"- {verdict}" for verdict in verdicts(results)), ""]
    for name, rows in results.items():
        cells = []
        for arm in ARMS:
            if arm not in rows:
                cells.append([arm, *["not run"] * 5])
                continue
            row = rows[arm]
            numbers = [f"{row['rise']:+.4f}", f"{row['kl']:.4f}", f"{row['same']:.1%}", f"{row['bound']:.1f}"]
            cells.append([arm, f"{row['knee']:g}", *numbers])
        lines += table([name, "knee", "rise", "KL", "same top token", "bound"], cells)
    return "\n".join(lines).rstrip() + "\n"


def main(command: list[str] | None = None) -> str:
    options, runs = study.parse(Options, command)
    results: dict[str, dict[str, Row]] = {}
    for given in options.models:
        converted = Converted(given, options.size)
        results[converted.name] = compare(converted, runs)
    return study.publish(page(results, provenance(runs.used)), options.out)


if __name__ == "__main__":
    main()
