"""What a conversion of a real model costs: calibration, a training step, and a token of generation.

    python recipes/benchmarks/real_cost.py --model "$(python recipes/real_model.py)" --text wikitext2-valid.txt

Each job runs in a process of its own, on the same 16,384 tokens. Its seconds count the import and the loading, which
is all that "load" does. "pass" is one pass of the unpatched model over the tokens, losses included, and "passes" are
measured in it, without the import and the loading. "peak" is the largest resident size.

Steps and tokens: the unpatched model and converted ones, with sharp norms, take turns in one process. A step is
forward, backward and AdamW's update for one sequence. A token is one step of generation, over a cache that starts with
as many keys. Times are medians (fastest to slowest), ratios medians within the turns (quartiles). "rise" is a step's
peak above the resident size before it, in a process for each model. Run it on a quiet machine. An interrupted run
continues. Writes a page and its runs; prints Markdown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from bench_cpu import cell, ratio_cell, training_step
from machine import busy_seconds, by_turns
from markdown_table import opening, publish, table
from run_log import Row, Runs, provenance
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import calibrate, patch_model
from hf_qknorm.cli import main as command
from hf_qknorm.measure.text import load_text, tokenize
from hf_qknorm.model.attention import every_norm
from hf_qknorm.small_model import mean_loss

PLAIN, SCHEMES = "unpatched", ("qk_norm", "qk_norm_cap")
SIZES = {"quick": ({16: 2, 48: 2}, 512), "full": ({512: 10, 4096: 4}, 16_384)}  # turns by length; tokens of a job
JOBS = ("load", "pass", "`calibrate`", "`hf-qknorm inspect`", "`hf-qknorm convert`")
MIB = 2**20


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


def job(name: str, checkpoint: str, text: str, tokens: int) -> Row:
    """The seconds of a job in a process of its own, and its largest resident size in bytes."""
    with TemporaryDirectory() as folder:
        texts, more = [checkpoint, "--data", text], ["--max-tokens", str(tokens)]
        run = {
            "load": partial(load, checkpoint),
            "pass": partial(one_pass, checkpoint, text, tokens),
            "`calibrate`": partial(calibrated, checkpoint, text, tokens),
            "`hf-qknorm inspect`": partial(command, ["inspect", *texts, "--out", folder, *more]),
            "`hf-qknorm convert`": partial(
                command, ["convert", checkpoint, f"{folder}/converted", "--data", text, *more]
            ),
        }[name]
        start = time.perf_counter()
        peak = in_process(_peak_of, run)
        return {"seconds": round(time.perf_counter() - start, 2), "peak": peak}


def in_process(run: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function of this module in a new process, with as many threads."""
    threads = (torch.get_num_threads(),)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, threads) as pool:
        return pool.submit(run, *arguments).result()


def _peak_of(run: Callable[[], object]) -> int:
    """The largest resident size while it runs, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # ru_maxrss would count earlier peaks, those of the parent too
    run()
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def random_tokens(model: Any, length: int) -> Tensor:
    return torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def generation(model: Any, length: int) -> Callable[[], object]:
    """A function that generates a token each time it is called, after a prompt."""
    state = {"input_ids": random_tokens(model, length), "past_key_values": None}

    @torch.no_grad()
    def step() -> None:
        out = model(**state, use_cache=True, logits_to_keep=1)
        state.update(input_ids=out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values)

    step()
    return step


def times(checkpoint: str, length: int, turns: int) -> Row:
    """The milliseconds of a training step and of a token, by model, and the CPUs that other programs used."""
    (machine, own), start = busy_seconds(), time.perf_counter()
    models = {name: load(checkpoint, name) for name in (PLAIN, *SCHEMES)}
    tokens = by_turns({name: generation(model.eval(), length) for name, model in models.items()}, 10 * turns)
    steps = {name: training_step(model.train(), random_tokens(model, length)) for name, model in models.items()}
    found = {"training step": by_turns(steps, turns), "token": tokens}
    spent = [after - before for after, before in zip(busy_seconds(), (machine, own), strict=True)]
    return {"times": found, "others": max(spent[0] - spent[1], 0) / (time.perf_counter() - start)}


def rise(checkpoint: str, name: str, length: int) -> Row:
    """The bytes by which a training step's peak is above the resident size before it, in this process."""
    model = load(checkpoint, name).train()
    training_step(model, random_tokens(model, 8))()
    step = training_step(model, random_tokens(model, length))
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"bytes": _peak_of(step) - before}


def jobs_section(found: dict[str, Row], tokens: int) -> list[str]:
    base, rows = found["load"]["seconds"], []
    for name, row in found.items():
        passes = f"{(row['seconds'] - base) / (found['pass']['seconds'] - base):.1f}"
        rows.append([name, f"{row['seconds']:.1f}", "" if name == "load" else passes, f"{row['peak'] / MIB:,.0f}"])
    return [f"## Jobs, {tokens:,} tokens", "", *table(["job", "seconds", "passes", "peak, MiB"], rows)]


def length_section(length: int, found: Row, rises: dict[str, int]) -> list[str]:
    rows = []
    for what, by_model in found["times"].items():
        for name, own in by_model.items():
            memory = f"{rises[name] / MIB:,.0f}" if what == "training step" else ""
            rows.append([f"{what}, {name}", cell(own), ratio_cell(own, by_model[PLAIN]), memory])
    lead = f"Other programs used {found['others']:.2f} CPUs during the timings."
    return [f"## {length:,} tokens", "", lead, "", *table(["", "ms", "÷ unpatched", "rise, MiB"], rows)]


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--out", type=Path, default=Path("recipes/results/real_cost"))
    options = parser.parse_args(arguments)
    turns, tokens = SIZES[options.size]
    runs, model, lines = Runs(options.out.with_suffix(".jsonl")), options.model, []
    settings = {"model": Path(model).name, "size": options.size}
    for length, count in turns.items():
        found = runs.get({**settings, "part": "times", "length": length}, partial(times, model, length, count))
        rises = {}
        for name in (PLAIN, *SCHEMES):
            asked = {**settings, "part": "rise", "length": length, "way": name}
            rises[name] = runs.get(asked, partial(in_process, rise, model, name, length))["bytes"]
        lines += length_section(length, found, rises)
    done = {}
    for name in JOBS:
        asked = {**settings, "part": "job", "job": name, "text": Path(options.text).name}
        done[name] = runs.get(asked, partial(job, name, model, options.text, tokens))
    lines += jobs_section(done, tokens)
    top = opening(f"What a real model's conversion costs: {settings['model']}", __doc__, provenance(runs.used))
    return publish("\n".join([*top, *lines]), options.out)


if __name__ == "__main__":
    main()
