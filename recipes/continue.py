"""Continue the training of a trained model on text of another kind, unpatched and converted, at rising learning rates.

    python recipes/continue.py --checkpoint CKPT --max_steps 300 --known tinyshakespeare.txt --text wikitext2-valid.txt

Does a converted model train at rates where the unpatched one fails, and where does it end? Each arm trains from the
same checkpoint at each rate, with each seed; within a seed all see the same batches. The knee and the gains are
calibrated on the text that the model knows. "lowered" ends with plain norms, by half of the run; "opened and removed"
raises the knee to infinity in the last quarter and is judged as the plain model, after `remove_norms`. All arguments of
the Trainer work, but for the rate and the seed. Each run is a line of `runs.jsonl` in the output folder; an interrupted
comparison continues. Prints held-out losses as Markdown, with the spread over the seeds, and the largest logits.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import text_trainer as common
from transformers.hf_argparser import HfArg

from hf_qknorm import KneeSchedule, calibrate, patch_model, remove_norms


@dataclass(frozen=True)
class Arm:
    """One way to train on: the scheme, None for the unpatched model, and the schedule of its knee, None to keep it."""

    scheme: str | None = None
    schedule: Callable[[], KneeSchedule] | None = None
    removed: bool = False


ARMS = {
    "unpatched": Arm(),
    "soft_cap": Arm("soft_cap"),
    "qk_norm, knee kept": Arm("qk_norm"),
    "qk_norm_cap, knee kept": Arm("qk_norm_cap"),
    "qk_norm_cap, knee lowered": Arm("qk_norm_cap", lambda: KneeSchedule(0.5)),
    "qk_norm, opened and removed": Arm("qk_norm", lambda: KneeSchedule(0.25, math.inf, after=0.75), removed=True),
}


@dataclass(kw_only=True)
class Options(common.BaseOptions):
    """The comparison's options, beside the Trainer's arguments."""

    checkpoint: str
    known: str | None = HfArg(default=None, help="the text that the model knows; default: --text")
    rates: list[float] = field(default_factory=lambda: [1e-3, 3e-3, 1e-2, 3e-2])
    seeds: int = 3
    knee: float | None = HfArg(default=None, help="of the norms; default: a search for the smallest")
    arms: list[str] = field(default_factory=lambda: list(ARMS), metadata={"choices": list(ARMS)})


def run(name: str, rate: float, seed: int, options: Options, given: common.Arguments) -> dict[str, float]:
    """Train an arm, and return its held-out loss and its largest |logit| before any cap."""
    arm, arguments = ARMS[name], copy.copy(given)
    arguments.learning_rate, arguments.seed = rate, seed
    model, tokenizer, text = common.start(options, arguments)
    if arm.scheme:
        patch_model(model, arm.scheme)
        if model.config.scheme.norms:
            known = common.Text(options.known or options.text, options.length, tokenizer)
            calibrate(
                model, known.batches(options.calibration, arguments.per_device_train_batch_size, 1), knee=options.knee
            )
    callbacks = [arm.schedule()] if arm.schedule else []
    trainer = common.make_trainer(model, text, tokenizer, arguments, options.every, callbacks=callbacks)
    trainer.train()
    if arm.removed:
        remove_norms(model)
    seen = [entry["attention/max_logit"] for entry in trainer.state.log_history if "attention/max_logit" in entry]
    return {"loss": trainer.evaluate()["eval_loss"], "largest": max(seen, default=math.nan)}


def results_table(options: Options, found: dict[str, dict[str, float]]) -> str:
    """Format the mean losses, ± the standard deviation over the seeds, and the largest logit of all seeds."""
    lines = ["| arm | " + " | ".join(f"{rate:g}" for rate in options.rates) + " |"]
    lines.append("|---|" + "---:|" * len(options.rates))
    for arm in options.arms:
        cells = []
        for rate in options.rates:
            results = [found[key(arm, rate, seed)] for seed in range(options.seeds)]
            losses = [result["loss"] for result in results]
            spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
            largest = max(result["largest"] for result in results)
            cells.append(f"{statistics.fmean(losses):.3f}{spread}; {largest:.0f}")
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(["", "Held-out loss in nats a token; largest |logit|:", "", *lines])


def key(arm: str, rate: float, seed: int) -> str:
    return f"{arm} at {rate:g}, seed {seed}"


def main(command: list[str] | None = None) -> str:
    options, arguments = common.parse(Options, "qknorm-continue", command)
    log = Path(arguments.output_dir) / "runs.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    found: dict[str, dict[str, float]] = {row.pop("run"): row for row in rows}
    for rate, seed, arm in product(options.rates, range(options.seeds), options.arms):
        name = key(arm, rate, seed)
        if name not in found:
            found[name] = run(arm, rate, seed, options, arguments)
            common.print_once(arguments, f"{name}: {found[name]}")
            if arguments.process_index == 0:
                with log.open("a") as file:
                    file.write(json.dumps({"run": name} | found[name]) + "\n")
    page = results_table(options, found)
    common.print_once(arguments, page)
    return page


if __name__ == "__main__":
    main()
