"""Benchmark generation by a patched model beside the same model unpatched: a step with a cache, and a prompt.

    python recipes/benchmarks/bench_generation.py --output recipes/results/generation.md

A small Llama with random weights, so that the time around the products is a large part. All variants have the same
weights in memory, and take turns in one run, each turn in another order; a ratio is the median over the turns of the
ratios to the unpatched model of the same turn, with its quartiles. A second unpatched model shows the noise. Threads
that wait for each other suffer from other programs: run the benchmark on a quiet machine. The page says how busy other
programs were.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers
from bench_tiled import busy_seconds, commit, cpu_name
from cost import ratio
from markdown_table import publish
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_qknorm import patch_model
from hf_qknorm.families.style import CACHE

UNPATCHED: Final = "unpatched"
VARIANTS: Final = {  # scheme, and the ratio to aim for
    UNPATCHED: (None, ""),
    "unpatched, again": (None, ""),
    "none": ("none", "1.02"),
    "qk_norm": ("qk_norm", "1.08"),
    "qk_norm_cap": ("qk_norm_cap", "1.10"),
}


class Size(NamedTuple):
    """The model's layers and width, the keys in the cache of a step, the prompt's tokens, and the steps of a turn."""

    layers: int = 4
    width: int = 256
    cached: tuple[int, ...] = (256, 4096)
    prompt: int = 1024
    steps: int = 10


SIZES: Final = {"small": Size(), "quick": Size(layers=1, width=64, cached=(8, 24), prompt=16, steps=2)}
Calls = dict[str, Callable[[], Any]]


def models(size: Size) -> dict[str, Any]:
    """The model of each variant, all with the same weights in memory."""
    config: dict[str, Any] = {
        "vocab_size": 257,
        "hidden_size": size.width,
        "intermediate_size": 43 * size.width // 16,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.width // 64,
        "num_key_value_heads": max(size.width // 128, 1),
        "head_dim": 64,
        "max_position_embeddings": 2 * max(size.prompt, *size.cached),
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    weights = LlamaForCausalLM(LlamaConfig(**config)).state_dict()
    made = {}
    for name, (scheme, _) in VARIANTS.items():
        made[name] = LlamaForCausalLM(LlamaConfig(**config)).eval()
        made[name].load_state_dict(weights, assign=True)
        made[name].tie_weights()
        if scheme is not None:
            patch_model(made[name], scheme)
    return made


def work(made: dict[str, Any], size: Size) -> dict[str, tuple[int, Calls]]:
    """For each kind of work, the number of calls in a turn, and a call of each variant."""
    prompt, token = (torch.randint(257, (1, n)) for n in (size.prompt, 1))

    def prefill(model: Any) -> Callable[[], Any]:
        return lambda: model(prompt, use_cache=True, logits_to_keep=1)

    def step(model: Any, cached: int) -> Callable[[], Any]:
        """A call that adds a token to the cache, of `cached` tokens at the start, and cuts it back at twice as many."""
        cache = DynamicCache(config=model.config)
        model(torch.zeros(1, cached, dtype=torch.int64), **{CACHE: cache})

        def call() -> None:
            model(token, **{CACHE: cache})
            if cache.get_seq_length() == 2 * cached:
                cache.crop(-cached)

        return call

    steps = {
        f"a step, over {cached} keys": (size.steps, {name: step(model, cached) for name, model in made.items()})
        for cached in size.cached
    }
    return steps | {f"a prompt of {size.prompt} tokens": (1, {name: prefill(model) for name, model in made.items()})}


def timed(count: int, calls: Calls, turns: int) -> dict[str, list[float]]:
    """The milliseconds of a call of each variant, turn by turn, after two turns of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffled = list(calls), random.Random(0)
    for turn in range(-2, turns):
        shuffled.shuffle(order)
        for name in order:
            calls[name]()  # the variant before leaves its own code in the processor's caches
            start = time.perf_counter()
            for _ in range(count):
                calls[name]()
            if turn >= 0:
                times[name].append(1e3 * (time.perf_counter() - start) / count)
    return times


def rows(label: str, times: dict[str, list[float]]) -> list[str]:
    """Rows of Markdown: the time of each variant, and its ratio to the unpatched model's."""
    found = []
    for name, spent in times.items():
        low, median, high = statistics.quantiles(spent, n=4)
        figures = f"{median:.2f} | {low:.2f} to {high:.2f} | {ratio(spent, times[UNPATCHED])} | {VARIANTS[name][1]}"
        found.append(f"| {label} | {name} | {figures} |")
    return found


@torch.no_grad()
def main(arguments: list[str] | None = None) -> dict[str, dict[str, list[float]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--turns", type=int, default=101)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="a Markdown file; default: print")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    size = SIZES[args.size]
    made = models(size)
    (machine, own), start = busy_seconds(), time.monotonic()
    times = {name: timed(count, calls, args.turns) for name, (count, calls) in work(made, size).items()}
    (machine_after, own_after), seconds = busy_seconds(), time.monotonic() - start
    others = max(machine_after - machine - own_after + own, 0) / seconds
    command = ["--size", args.size] * (args.size != "small") + ["--turns", str(args.turns)] * (args.turns != 101)
    command += ["--threads", str(args.threads)] * (args.threads != 2)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    parameters = sum(x.numel() for x in made[UNPATCHED].parameters())
    text = "\n".join(
        [
            "# Generation beside the unpatched model",
            "",
            f"`{' '.join(['python recipes/benchmarks/bench_generation.py', *command])} --output "
            "recipes/results/generation.md`",
            "",
            f"{cpu_name()}, {args.threads} threads (other programs used {others:.2f} CPUs), {versions}, commit "
            f"{commit('hf_qknorm')}, {datetime.date.today()}.",
            "",
            f"A Llama of {parameters / 1e6:.1f} M parameters in fp32: {size.layers} layers, {size.width} wide, heads "
            f"of 64, batch 1. {args.turns} turns of {size.steps} steps or one prompt. A step adds a token "
            "to the cache, up to twice the tokens at the start. The last column is the ratio that the project "
            "aims for.",
            "",
            "| work | model | ms: median | quartiles | of the unpatched model's (quartiles) | aim |",
            "|---|---|---:|---:|---:|---:|",
            *(row for name, spent in times.items() for row in rows(name, spent)),
        ]
    )
    publish(text, args.output)
    return times


if __name__ == "__main__":
    main()
