"""What a conversion of a real model costs: calibration, a training step, and generation.

    python recipes/benchmarks/real_cost.py --model "$(python recipes/real_model.py)" --text wikitext2-valid.txt

Each job runs in a process of its own, on the same 16,384 tokens. Its seconds count the import and the loading, which
is all that "load" does. "pass" is one pass of the unpatched model over the tokens, losses included, and "passes" are
measured in it, without the import and the loading. "peak" is the largest resident size.

The unpatched model and converted ones, with sharp norms, take turns in one process. A training step is forward,
backward and AdamW's update for one sequence. Generation takes steps over a cache that starts with as many keys. Times
are medians (fastest to slowest), ratios medians within the turns (quartiles). Run it on a quiet machine. Writes a page.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from bench_cpu import GENERATED, draw_tokens, generation, training_step
from page import provenance, publish, table
from timing import Times, beside_others, by_turns, cell, in_process, peak_of, ratio_cell
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import calibrate, convert_checkpoint, patch_model
from hf_qknorm.inspection.inspect import inspect_checkpoint
from hf_qknorm.measure.text import load_text, tokenize
from hf_qknorm.model.attention import every_norm
from hf_qknorm.small_model import mean_loss

PLAIN, SCHEMES = "unpatched", ("qk_norm", "qk_norm_cap")
SIZES = {"quick": ({16: 2}, 512), "full": ({512: 10, 4096: 4}, 16_384)}  # turns by length; tokens of a job
JOBS = ("load", "pass", "`calibrate`", "`inspect_checkpoint`", "`convert_checkpoint`")


def load(checkpoint: str, name: str = PLAIN) -> Any:
    """The model in fp32; the converted ones have gains of 1, and norms as sharp as calibrated ones."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if name != PLAIN:
        for norm in every_norm(patch_model(model, name)):
            norm.set_shape(norm.rounded(3.0, 1.0, 8.0))
    return model


def one_pass(checkpoint: str, text: str, tokens: int) -> None:
    ids = tokenize(AutoTokenizer.from_pretrained(checkpoint), load_text(text, limit=16 * tokens))[:tokens]
    length = min(256, tokens // 2)
    mean_loss(load(checkpoint), list(ids[: len(ids) // length * length].view(-1, length).split(8)))


def calibrated(checkpoint: str, text: str, tokens: int) -> None:
    calibrate(patch_model(load(checkpoint), "qk_norm_cap"), text, max_tokens=tokens)


def job(name: str, checkpoint: str, text: str, tokens: int) -> tuple[float, int]:
    """The seconds of a job in a process of its own, and its largest resident size in MiB."""
    with TemporaryDirectory() as folder:
        data: dict[str, Any] = {"data": text, "max_tokens": tokens}
        run = {
            "load": partial(load, checkpoint),
            "pass": partial(one_pass, checkpoint, text, tokens),
            "`calibrate`": partial(calibrated, checkpoint, text, tokens),
            "`inspect_checkpoint`": partial(inspect_checkpoint, checkpoint, **data),
            "`convert_checkpoint`": partial(convert_checkpoint, checkpoint, f"{folder}/converted", **data),
        }[name]
        start = time.perf_counter()
        peak = in_process(partial(peak_of, run))
        return time.perf_counter() - start, peak


def times(checkpoint: str, length: int, turns: int) -> dict[str, Times]:
    """The milliseconds of a training step and of generation, by model."""
    models = {name: load(checkpoint, name) for name in (PLAIN, *SCHEMES)}
    tokens = draw_tokens(1, length, vocabulary=models[PLAIN].config.vocab_size)
    generated = by_turns({name: generation(model.eval(), tokens) for name, model in models.items()}, 4 * turns)
    steps = {name: training_step(model.train(), tokens) for name, model in models.items()}
    return {"training step": by_turns(steps, turns), f"{GENERATED} steps of generation": generated}


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--out", type=Path, default=Path("real_cost"), help="the page, without its ending")
    options = parser.parse_args(arguments)
    (turns, tokens), model, lines = SIZES[options.size], options.model, []
    for length, count in turns.items():
        found, busy = beside_others(partial(times, model, length, count))
        rows = [
            [f"{what}, {name}", cell(own), ratio_cell(own, by_model[PLAIN])]
            for what, by_model in found.items()
            for name, own in by_model.items()
        ]
        lines += [f"## {length:,} tokens", "", f"{busy}.", "", *table(["", "ms", "÷ unpatched"], rows)]
    done = {name: job(name, model, options.text, tokens) for name in JOBS}
    base, one = done["load"][0], done["pass"][0]
    rows = [
        [name, f"{seconds:.1f}", "" if name == "load" else f"{(seconds - base) / (one - base):.1f}", f"{peak:,}"]
        for name, (seconds, peak) in done.items()
    ]
    lines += [f"## Jobs, {tokens:,} tokens", "", *table(["job", "seconds", "passes", "peak, MiB"], rows)]
    title = f"What a real model's conversion costs: {Path(model).name}"
    return publish(title, __doc__, provenance(), lines, options.out)


if __name__ == "__main__":
    main()
