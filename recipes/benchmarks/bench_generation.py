"""Benchmark generation on the CPU beside the unpatched model: steps, and a prompt.

    python recipes/benchmarks/bench_generation.py --output recipes/results/generation.md
    python recipes/benchmarks/bench_generation.py --model "$(python recipes/real_model.py)"

A Llama of 3.0 M parameters, or a given checkpoint, with each scheme. The models take turns in one process: in each turn
one of them takes ten steps over a growing cache, which is then cut back, or reads a prompt. A ratio is the median of
the ratios within the turns, with its quartiles. The limits were set before the first run. Run it on a quiet machine:
the page says how busy others were.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_cpu import compared_cells
from machine import Times, beside_others, by_turns, made
from markdown_table import publish, table
from run_log import provenance
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_qknorm as qk
from hf_qknorm.families.style import CACHE

PLAIN = "unpatched"
MODELS = {  # scheme and backend, None for the default one
    PLAIN: (None, None),
    "unpatched, again": (None, None),
    "none": ("none", None),
    "soft_cap": ("soft_cap", None),
    "qk_norm": ("qk_norm", None),
    "qk_norm, hf_qknorm": ("qk_norm", "hf_qknorm"),
    "qk_norm_cap": ("qk_norm_cap", None),
}
STEPS = 10


def load(checkpoint: str | None, scheme: str | None, backend: str | None) -> Any:
    torch.manual_seed(0)
    if checkpoint is None:
        sizes = {"hidden_size": 256, "intermediate_size": 682, "num_hidden_layers": 4, "num_attention_heads": 4}
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=257, max_position_embeddings=8192))
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if scheme is not None:
        qk.patch_model(model, scheme, attn_implementation=backend)
    return model.eval()


def steps(model: Any, keys: int) -> Callable[[], None]:
    """Ten steps over a cache of so many keys at first."""
    tokens = torch.randint(250, (1, keys), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    forward = partial(model, use_cache=True, logits_to_keep=1, **{CACHE: cache})
    forward(tokens)

    def run() -> None:
        for _ in range(STEPS):
            forward(tokens[:, :1])
        cache.crop(-STEPS)

    return run


def prompt(model: Any) -> Callable[[], None]:
    tokens = torch.randint(250, (1, 1024), generator=torch.Generator().manual_seed(0))
    return lambda: model(tokens, use_cache=True, logits_to_keep=1)


WORK: dict[str, tuple[Callable[[Any], Callable[[], None]], float]] = {  # and the limit of its ratio
    f"{STEPS} steps over 256 keys": (partial(steps, keys=256), 1.00),
    f"{STEPS} steps over 4,096 keys": (partial(steps, keys=4096), 0.80),
    "a prompt of 1,024 tokens": (prompt, 1.00),
}


@torch.inference_mode()
def times_of(checkpoint: str | None, work: Callable[[Any], Callable[[], None]], turns: int) -> Times:
    return by_turns({name: work(load(checkpoint, *how)) for name, how in MODELS.items()}, turns)


def report(args: argparse.Namespace, arguments: list[str]) -> str:
    """Measure everything; return a Markdown page."""
    measured, busy = beside_others(
        lambda: {name: times_of(args.model, work, args.turns) for name, (work, _) in WORK.items()}
    )
    subject = Path(args.model).name if args.model else "a Llama of 4 layers, 256 wide, with heads of 64"
    lines = [
        "# Generation beside the unpatched model",
        "",
        f"`python recipes/benchmarks/bench_generation.py {' '.join(arguments)}`".rstrip(),
        "",
        f"{busy}; {provenance([{'made': made()}])}",
        "",
        f"Of {subject}, in fp32, batch 1; {args.turns} turns. Times are medians (fastest to slowest), ratios medians "
        "within the turns (quartiles).",
        "",
    ]
    for title, (_, limit) in WORK.items():
        head = (title, "ms", f"{PLAIN}, ms", "ratio", "limit")
        rows = [(name, *compared_cells(measured[title], name, PLAIN, limit)) for name in MODELS if name != PLAIN]
        lines += table(head, rows)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", metavar="NAME", help="a folder or a name on the Hub; default: a small Llama")
    parser.add_argument("--turns", type=int, default=61)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the Markdown there as well")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    publish(report(args, sys.argv[1:]), args.output)


if __name__ == "__main__":
    main()
