"""What a conversion of a real model costs: calibration, a training step, and a token of generation.

    python recipes/benchmarks/real_cost.py --model "$(python recipes/real_model.py)" --text wikitext2-valid.txt

Each job runs in a process of its own, on the same 16,384 tokens. Its seconds count the import and the loading, which
is all that "load" does. "pass" is one pass of the unpatched model over the tokens, losses included, and "passes" are
measured in it, without the import and the loading. "peak" is the largest resident size.

Steps and tokens: the unpatched model and converted ones, with sharp norms, take turns in one process. A step is
forward, backward and AdamW's update for one sequence. A token is one step of generation, over a cache that starts with
as many keys. Times are medians (fastest to slowest), ratios medians within the turns (quartiles). "rise" is a step's
peak above the resident size before it, in a process for each model. Run it on a quiet machine. Writes a page; prints
Markdown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from bench_cpu import cell, ratio_cell, training_step
from machine import Times, busy_seconds, by_turns, made
from markdown_table import opening, publish, table
from run_log import provenance
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import Scheme, calibrate, patch_model
from hf_qknorm.demo.training import mean_loss
from hf_qknorm.measure.text import load_text, tokenize
from hf_qknorm_command import main as command

PLAIN, SCHEMES = "unpatched", ("qk_norm", "qk_norm_cap")
SIZES = {"quick": ({16: 2, 48: 2}, 512), "full": ({512: 10, 4096: 4}, 16_384)}  # turns by length; tokens of a job
MIB = 2**20


class Job(NamedTuple):
    """The wall time of a process and its largest resident size."""

    seconds: float
    peak: int


def load(checkpoint: str, name: str = PLAIN) -> Any:
    """The model in fp32; the converted ones have gains of 1, which take the same time as calibrated ones."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model if name == PLAIN else patch_model(model, replace(Scheme.of(name), knee=3.0, sharpness=8))


def one_pass(checkpoint: str, text: str, tokens: int) -> None:
    ids = tokenize(AutoTokenizer.from_pretrained(checkpoint), load_text(text, limit=16 * tokens))[:tokens]
    length = min(256, tokens // 2)
    mean_loss(load(checkpoint), list(ids[: len(ids) // length * length].view(-1, length).split(8)))


def calibrated(checkpoint: str, text: str, tokens: int) -> None:
    calibrate(patch_model(load(checkpoint), "qk_norm_cap"), text, max_tokens=tokens)


def jobs(checkpoint: str, text: str, tokens: int) -> dict[str, Job]:
    """The jobs; the commands are those that a user types."""
    with TemporaryDirectory() as folder:
        more = ["--tokens", str(tokens)]
        named: dict[str, Callable[[], object]] = {
            "load": partial(load, checkpoint),
            "pass": partial(one_pass, checkpoint, text, tokens),
            "`calibrate`": partial(calibrated, checkpoint, text, tokens),
            "`hf-qknorm inspect`": partial(command, ["inspect", checkpoint, "--texts", text, "--out", folder, *more]),
            "`hf-qknorm convert`": partial(
                command, ["convert", checkpoint, f"{folder}/converted", "--calibrate", text, *more]
            ),
        }
        return {name: _in_process(run) for name, run in named.items()}


def _in_process(run: Callable[[], object]) -> Job:
    start = time.perf_counter()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, _threads()) as pool:
        peak = pool.submit(_peak_of, run).result()
    return Job(time.perf_counter() - start, peak)


def _threads() -> tuple[int]:
    return (torch.get_num_threads(),)


def _peak_of(run: Callable[[], object]) -> int:
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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


def times(checkpoint: str, length: int, turns: int) -> dict[str, Times]:
    """The times of a training step and of a token, by model."""
    models = {name: load(checkpoint, name) for name in (PLAIN, *SCHEMES)}
    tokens = by_turns({name: generation(model.eval(), length) for name, model in models.items()}, 10 * turns)
    steps = {name: training_step(model.train(), random_tokens(model, length)) for name, model in models.items()}
    return {"training step": by_turns(steps, turns), "token": tokens}


def rise(checkpoint: str, name: str, length: int) -> int:
    """The bytes by which a training step's peak is above the resident size before it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, _threads()) as pool:
        return pool.submit(_rise, checkpoint, name, length).result()


def _rise(checkpoint: str, name: str, length: int) -> int:
    model = load(checkpoint, name).train()
    training_step(model, random_tokens(model, 8))()
    step = training_step(model, random_tokens(model, length))
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return _peak_of(step) - before


def jobs_section(found: dict[str, Job], tokens: int) -> list[str]:
    base, rows = found["load"].seconds, []
    for name, job in found.items():
        passes = (job.seconds - base) / (found["pass"].seconds - base)
        rows.append([name, f"{job.seconds:.1f}", "" if name == "load" else f"{passes:.1f}", f"{job.peak / MIB:,.0f}"])
    return [f"## Jobs, {tokens:,} tokens", "", *table(["job", "seconds", "passes", "peak, MiB"], rows)]


def length_section(length: int, found: dict[str, Times], rises: dict[str, int]) -> list[str]:
    rows = []
    for what, by_model in found.items():
        for name, own in by_model.items():
            memory = f"{rises[name] / MIB:,.0f}" if what == "training step" else ""
            rows.append([f"{what}, {name}", cell(own), ratio_cell(own, by_model[PLAIN]), memory])
    return [f"## {length:,} tokens", "", *table(["", "ms", "÷ unpatched", "rise, MiB"], rows)]


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--out", type=Path, default=Path("recipes/results/real_cost"))
    options = parser.parse_args(arguments)
    turns, tokens = SIZES[options.size]
    (machine, own), start = busy_seconds(), time.perf_counter()
    found = {length: times(options.model, length, count) for length, count in turns.items()}
    spent = [after - before for after, before in zip(busy_seconds(), (machine, own), strict=True)]
    others = max(spent[0] - spent[1], 0) / (time.perf_counter() - start)
    quiet = f"{provenance([{'made': made()}])[:-1]}; other programs used {others:.2f} CPUs during the timings."
    lines = opening(f"What a real model's conversion costs: {Path(options.model).name}", __doc__, quiet)
    for length in turns:
        rises = {name: rise(options.model, name, length) for name in (PLAIN, *SCHEMES)}
        lines += length_section(length, found[length], rises)
    lines += jobs_section(jobs(options.model, options.text, tokens), tokens)
    return publish("\n".join(lines), options.out)


if __name__ == "__main__":
    main()
