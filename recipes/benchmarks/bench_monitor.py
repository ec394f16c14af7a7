"""Benchmark the cost of LogitMonitor during training, on the CPU: sampled steps beside plain ones.

    python recipes/benchmarks/bench_monitor.py --output recipes/results/monitor.md

One model takes plain and sampled steps by turns; each sampled step is compared with its two plain neighbours. The
figure is the CPU time of the process, on which other programs have the least effect. The monitor does nothing between
samples, so that its mean cost is that of a sampled step divided by N. A sampled step includes writing its JSONL line.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_tiled import busy_seconds, commit, cpu_name
from markdown_table import publish
from transformers import LlamaConfig, LlamaForCausalLM

from hf_qknorm import LogitMonitor, patch_model

CASES = (  # scheme, attention, batch, length, sequences that are watched
    ("none", "sdpa", 8, 256, 2),
    ("none", "sdpa", 4, 512, 2),
    ("none", "sdpa", 4, 512, 4),
    ("qk_norm_cap", "hf_qknorm", 4, 512, 2),
)
EVERY = 10
COLUMNS = ("scheme", "attention", "batch", "length", "rows watched", "plain, CPU ms: median", "min", "max")
COLUMNS += ("sampled, CPU ms: median", "min", "max", "extra: median", "quarters", "of a step", f"at N = {EVERY}")


def llama(scheme: str, attention: str) -> LlamaForCausalLM:
    """A Llama of 4.7 million parameters in 4 layers of 8 heads, two queries per key."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
    )
    return patch_model(LlamaForCausalLM(config), scheme, attn_implementation=attention).train()


def timed(case: tuple[str, str, int, int, int], pairs: int, folder: Path) -> tuple[list[float], list[float]]:
    """Return the CPU milliseconds of plain steps (one more than sampled) and of sampled steps."""
    scheme, attention, batch, length, rows = case
    model = llama(scheme, attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(2048, (batch, length), generator=torch.Generator().manual_seed(0))
    monitor = LogitMonitor(every=2, rows=rows, path=folder / f"{'-'.join(map(str, case))}.jsonl")
    times: list[float] = []
    for step in range(1, 2 * pairs + 6):
        start = time.process_time()
        with monitor.watch(model, step):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(1e3 * (time.process_time() - start))
    times = times[4:]  # the first steps warm up
    return times[::2], times[1::2]


def row(case: tuple[str, str, int, int, int], plain: list[float], sampled: list[float]) -> str:
    around = [(a + b) / 2 for a, b in zip(plain, plain[1:], strict=False)]
    first, extra, third = statistics.quantiles([s - p for s, p in zip(sampled, around, strict=True)])
    share = extra / statistics.median(plain)
    numbers = [f"{f(times):.0f}" for times in (plain, sampled) for f in (statistics.median, min, max)]
    cells = [
        *map(str, case),
        *numbers,
        f"{extra:.1f}",
        f"{first:.1f} to {third:.1f}",
        f"{share:.1%}",
        f"{share / EVERY:.2%}",
    ]
    return f"| {' | '.join(cells)} |"


def report(args: argparse.Namespace) -> str:
    (machine, own), start = busy_seconds(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(case, *timed(case, args.pairs, Path(folder))) for case in CASES]
    machine, own = (after - before for after, before in zip(busy_seconds(), (machine, own), strict=True))
    others = max(machine - own, 0) / (time.perf_counter() - start)
    versions: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        "# What LogitMonitor costs",
        "",
        f"`python recipes/benchmarks/bench_monitor.py {' '.join(sys.argv[1:])}`",
        "",
        f"{cpu_name()}, {args.threads} of {os.cpu_count()} CPUs (other programs used {others:.2f} CPUs), "
        f"{named}, Python {platform.python_version()}, commit {commit('hf_qknorm/training')}, "
        f"{datetime.date.today()}.",
        "",
        "fp32 training steps (forward, backward, AdamW) of a Llama of 4 layers, 8 heads of 32 on 4 key heads, hidden "
        f"size 256, vocabulary 2,048; {args.pairs} sampled steps per row, alternating with plain ones. The extra is "
        "the difference between a sampled step and the mean of its two neighbours: the median over the sampled steps, "
        "and the quartiles. All times are CPU time, on which other programs have the least effect. The monitor does "
        "nothing between samples, so that its mean cost is the extra divided by N.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|" + "---:|" * (len(COLUMNS) - 2),
        *rows,
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the Markdown there as well")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    page = report(args)
    publish(page, args.output)


if __name__ == "__main__":
    main()
