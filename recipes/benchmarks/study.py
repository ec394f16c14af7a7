"""The frame of a small study: options, a text of bytes, runs by rate and arm that continue from a log, and a page."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from run_log import Row, Runs
from torch import Tensor, nn
from transformers import HfArgumentParser

from hf_qknorm.demo.training import byte_tokenizer
from hf_qknorm.files.atomic_io import replace_file, replace_text
from hf_qknorm.measure.text import load_text, tokenize

Results = dict[tuple[float, str], list[Row]]  # by rate and arm, a row for each seed


@dataclass(kw_only=True)
class Options:
    """The options of a study: its text, its size, the number of seeds, and its files without their endings."""

    text: str
    size: str = field(default="full", metadata={"choices": ["quick", "full"]})
    seeds: int = 3
    out: Path


def parse(options: Any, command: list[str] | None) -> tuple[Any, Runs]:
    """The options from the command line, and the log of their runs. The process computes with one thread."""
    (found,) = HfArgumentParser(options).parse_args_into_dataclasses(command)
    logging.getLogger("hf_qknorm").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    return found, Runs(found.out.with_suffix(".jsonl"))


def bytes_of(source: str) -> tuple[dict[str, Tensor], int]:
    """The bytes of a text as tokens, the first nine tenths "seen" and the last "held_out", and its characters."""
    text = load_text(source)
    cut = int(len(text) * 0.9)
    parts = {"seen": text[:cut], "held_out": text[cut:]}
    return {name: tokenize(byte_tokenizer(), part) for name, part in parts.items()}, len(text)


def trained_once(model: nn.Module, path: Path, train: Callable[[], None]) -> None:
    """Load the model's weights from `path`; without that file, train the model and store them there."""
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        train()
        replace_file(path, lambda place: torch.save(model.state_dict(), place))


def by_rate_and_arm(
    options: Any, runs: Runs, arms: Sequence[str], settings: Row, run: Callable[[str, float, int], Row]
) -> Results:
    """The result of `run(arm, rate, seed)` for each of the options' rates, each arm and each seed; whole seeds first.

    The log finds a run by its `settings`, to which arm, rate and seed are added.
    """
    results: Results = {(rate, arm): [] for rate in options.rates for arm in arms}
    for seed in range(options.seeds):
        for (rate, arm), rows in results.items():
            asked = {**settings, "arm": arm, "rate": rate, "seed": seed}
            rows.append(runs.get(asked, partial(run, arm, rate, seed)))
            print(f"rate {rate:g}, {arm}, seed {seed}: {rows[-1]}", flush=True)
    return results


def opening(title: str, doc: str | None, made: str) -> list[str]:
    """The first lines of a page: the command and the description of a recipe's docstring, and how it was `made`."""
    command, _, about = (doc or "").partition("\n\n")[2].partition("\n\n")
    return [f"# {title}", "", f"```\n{command.strip()}\n```", "", about.strip(), "", made, ""]


def publish(page: str, out: Path) -> str:
    """Write the page beside the log of its runs, print it, and return it."""
    replace_text(out.with_suffix(".md"), page)
    print(page)
    return page
