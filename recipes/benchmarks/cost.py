"""Benchmark the cost of a training step under each scheme, beside the same model with plain attention: time, memory.

    python recipes/benchmarks/cost.py
    python recipes/benchmarks/cost.py --size gpu --device cuda --bf16 true

A GPT-2 with random weights on random tokens: forward, backward and AdamW's step. The variants take turns in one run; a
ratio is the median over the turns of the ratios within a turn, with its quartiles, so that other programs affect all
alike. On a CPU the figure is CPU time, on which other programs have the least effect. Memory is the rise of the peak
over a step: of the resident size on a CPU (in a process per variant, Linux only), of torch's allocations on a GPU.
Prints Markdown, and writes it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import statistics
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from arms import ARMS as STABLE
from arms import Arm
from bench_tiled import status_mib
from run_log import made, provenance
from sweep import Size
from torch.optim import AdamW
from tqdm.auto import tqdm
from transformers import HfArgumentParser

from hf_qknorm import SCHEMES
from hf_qknorm.demo.training import decay_groups
from hf_qknorm.files.atomic_io import replace_text

VOCABULARY = 512
BASELINE = "none"
ARMS = {**{name: Arm(name) for name in SCHEMES}, **{name: STABLE[name] for name in ("QuacK", "QK-clip")}}

SIZES = {
    "quick": Size(layers=1, heads=2, width=64, length=128, batch=8, steps=0),
    "cpu": Size(layers=4, heads=4, width=256, length=256, batch=4, steps=0),
    "gpu": Size(layers=12, heads=12, width=768, length=1024, batch=16, steps=0),
}


@dataclass
class Options:
    """The options of the benchmark."""

    size: str = field(default="cpu", metadata={"choices": list(SIZES)})
    turns: int = 15
    device: str = "cpu"
    bf16: bool = False
    threads: int = 1
    out: Path = Path("recipes/results/cost.md")


class Training:
    """A model in training; a call takes one step."""

    def __init__(self, arm: Arm, options: Options) -> None:
        torch.manual_seed(0)
        size = SIZES[options.size]
        self.options = options
        self.model: Any = size.build(VOCABULARY, arm.scheme).to(options.device)
        self.optimizer = arm.around(self.model, AdamW(decay_groups(self.model, 0.1), lr=1e-4))
        self.ids = torch.randint(VOCABULARY, (size.batch, size.length), device=options.device)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.options.device, torch.bfloat16, enabled=self.options.bf16)

    def __call__(self) -> None:
        with self.autocast():
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.options.device == "cuda":
            torch.cuda.synchronize()


def timed(options: Options) -> dict[str, list[float]]:
    """Return the milliseconds per step of each variant, turn by turn, after two turns of warm-up."""
    implementations = {name: Training(arm, options) for name, arm in ARMS.items()}
    times: dict[str, list[float]] = {name: [] for name in implementations}
    clock = time.perf_counter if options.device == "cuda" else time.process_time
    for turn in tqdm(range(-2, options.turns), desc="taking turns", unit="turn"):
        for name, step in implementations.items():
            start = clock()
            step()
            if turn >= 0:
                times[name].append(1e3 * (clock() - start))
    return times


def extra_mib(arm: Arm, options: Options) -> float:
    """Return the rise of the memory peak over a step, in MiB."""
    step = Training(arm, options)
    step()
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL(None).malloc_trim(0)  # freed memory would be used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status_mib("VmRSS")
    step()
    return status_mib("VmHWM") - before


def measured_apart(arm: Arm, options: Options) -> float:
    """Return `extra_mib`; on a CPU from a process whose memory no other variant has used."""
    if options.device == "cuda":
        return extra_mib(arm, options)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(extra_mib, (arm, options))


def ratio(times: list[float], others: list[float]) -> str:
    """Return the median and the quartiles of the turns' ratios."""
    turns = [mine / other for mine, other in zip(times, others, strict=True)]
    low, middle, high = statistics.quantiles(turns, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def page(times: dict[str, list[float]], mib: dict[str, float], options: Options) -> str:
    """Format the results as Markdown."""
    dtype = "bf16 autocast" if options.bf16 else "fp32"
    command = f"python recipes/benchmarks/cost.py --size {options.size} --device {options.device} --bf16 {options.bf16}"
    lines = [
        "# What a training step costs",
        "",
        f"```\n{command}\n```",
        "",
        (__doc__ or "").split("\n\n")[2].strip(),
        "",
    ]
    lines += [provenance([{"made": made()}]), "", f"`{SIZES[options.size]}`, {dtype}, {options.turns} turns.", ""]
    lines += ["| | ms, median | min | max | of the baseline's | MiB | of the baseline's |", "|---" + "|---:" * 6 + "|"]
    for name, runs in times.items():
        cells = [*(f"{f(runs):.1f}" for f in (statistics.median, min, max)), ratio(runs, times[BASELINE])]
        cells += [f"{mib[name]:.0f}", f"{mib[name] / mib[BASELINE]:.2f}"]
        lines.append(f"| {'baseline' if name == BASELINE else name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses(arguments)
    torch.set_num_threads(options.threads)
    mib = {name: measured_apart(arm, options) for name, arm in tqdm(ARMS.items(), desc="memory", unit="scheme")}
    times = timed(options)
    text = page(times, mib, options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(options.out, text)
    print(text)
    return times


if __name__ == "__main__":
    main()
