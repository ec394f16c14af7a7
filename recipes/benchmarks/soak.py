"""Check that nothing grows over long training, patching and generation.

    python recipes/benchmarks/soak.py --out recipes/results/soak.md
    python recipes/benchmarks/soak.py --steps 100 --cycles 50 --generations 20

A tiny model takes 2,000 steps of AdamW under LogitMonitor; models are patched and unpatched 500 times, each time with
another cap; 200 texts are generated, with dynamic and static caches, with and without left padding. After a warm-up of
a tenth, memory, open files, threads, tensors, modules, hooks, classes, and the entries of registries and caches are
counted at 10 points. No count may be larger at the end than at the start; memory may drift by 4 MiB in all. The exit
status is 1 if anything grows.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import test_helpers_path  # noqa: F401
import torch
from machine import made
from markdown_table import publish, table
from run_log import provenance
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from hf_qknorm import LogitMonitor, Scheme, patch_model, unpatch_model
from qknorm_tests.tiny import tiny_model

POINTS = 10
DRIFT = 4 * 2**20  # bytes of memory over a whole phase: what the allocator's arenas move by
FAMILIES = ("llama", "gpt2", "mixtral", "gpt_neox", "gemma2")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
Counts = dict[str, float]


@dataclass(frozen=True)
class Growth:
    """One count of a phase: at the first and the last point, and its growth."""

    phase: str
    name: str
    first: float
    last: float
    growth: float
    limit: float

    @property
    def grows(self) -> bool:
        return self.growth > self.limit


def held() -> Counts:
    """Return the counts of the process, after a garbage collection."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    found = gc.get_objects()
    # by type: isinstance asks the object, and some of torch's warn then
    modules = [one for one in found if issubclass(type(one), nn.Module)]
    tensors = [one for one in found if issubclass(type(one), torch.Tensor)]
    hooks = sum(len(getattr(module, kind)) for module in modules for kind in HOOKS)
    hooks += sum(len(getattr(tensor, "_backward_hooks", None) or ()) for tensor in tensors if tensor.is_leaf)
    hooks += sum(len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ()) for tensor in tensors)
    own = [module for name, module in sys.modules.items() if name.startswith("hf_qknorm") and module is not None]
    cached = {id(one): one for module in own for one in vars(module).values() if hasattr(one, "cache_info")}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * resource.getpagesize(),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "tensors": len(tensors),
        "modules": len(modules),
        "hooks": hooks,
        "classes": sum(issubclass(type(one), type) for one in found),
        "cached results of hf_qknorm": sum(one.cache_info().currsize for one in cached.values()),
        "recordable outputs": len(_CAN_RECORD_REGISTRY),
        "conversions of checkpoints": len(conversion_mapping._checkpoint_conversion_mapping_cache or ()),
        "attention functions": len(AttentionInterface()) + len(AttentionMaskInterface()),
        "Auto configs": len(CONFIG_MAPPING._modules) + len(CONFIG_MAPPING._extra_content),
    }


def slope(values: list[float]) -> float:
    """Return the median growth between points (Theil–Sen), which a few odd points do not move."""
    pairs = combinations(range(len(values)), 2)
    return statistics.median((values[b] - values[a]) / (b - a) for a, b in pairs)


def soak(phase: str, count: int, turn: Callable[[int], None]) -> list[Growth]:
    """Take `count` turns after a warm-up of a tenth, and return the growth of every count."""
    warmup = max(count // 10, 2 * len(FAMILIES))
    for number in range(warmup):
        turn(number)
    points, done = [held()], 0
    for point in range(1, POINTS):
        until = count * point // (POINTS - 1)
        for number in range(done, until):
            turn(warmup + number)
        done = until
        points.append(held())
    grown = []
    for name, first in points[0].items():
        values = [point[name] for point in points]
        memory = name == "memory"
        growth = slope(values) * (POINTS - 1) if memory else values[-1] - first
        grown.append(Growth(phase, name, first, values[-1], growth, DRIFT if memory else 0))
    return grown


def training(folder: Path) -> Callable[[int], None]:
    """Take a step of AdamW under LogitMonitor."""
    model: Any = patch_model(tiny_model("llama"), "qk_norm_cap").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    monitor = LogitMonitor(every=10, path=folder / "logits.jsonl")
    generator = torch.Generator().manual_seed(0)

    def step(number: int) -> None:
        tokens = torch.randint(64, (2, 32), generator=generator)
        with monitor.watch(model, number + 1):
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def patching() -> Callable[[int], None]:
    """Patch a model, run it, unpatch it; sometimes build another of its kind and drop it."""
    models: list[Any] = [tiny_model(family) for family in FAMILIES]
    tokens = torch.arange(16)[None]

    def cycle(number: int) -> None:
        place = number % len(FAMILIES)
        model = models[place] if number % 2 else tiny_model(FAMILIES[place])
        norms = (None, "rms", "layer")[number % 3]
        patch_model(model, Scheme(q=norms, k=norms, softcap=20 + number / 100))
        model(input_ids=tokens)
        unpatch_model(model)

    return cycle


def generating() -> Callable[[int], None]:
    """Generate a few tokens, in each way by turns."""
    model: Any = patch_model(tiny_model("llama"), "qk_norm_cap")
    tokens = torch.arange(3, 27).view(2, 12)
    padded = torch.ones_like(tokens)
    padded[0, :5] = 0

    def generate(number: int) -> None:
        mask = padded if number // 2 % 2 else torch.ones_like(tokens)
        options = {"cache_implementation": ("dynamic", "static")[number % 2], "disable_compile": True}
        model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=6, do_sample=False, **options)

    return generate


def page(grown: list[Growth], seconds: float) -> str:
    rows = []
    for one in grown:
        unit = (lambda x: f"{x / 2**20:.1f} MiB") if one.name == "memory" else "{:,.0f}".format
        numbers = map(unit, (one.first, one.last, one.growth))
        rows.append([one.phase, one.name, *numbers, "GROWS" if one.grows else "flat"])
    head = ["phase", "held", "after the warm-up", "at the end", "growth", ""]
    return f"""# Soak

`python recipes/benchmarks/soak.py {" ".join(sys.argv[1:])}`

{seconds:.0f} s; {provenance([{"made": made()}])} Growth of memory is the median slope over {POINTS} points, scaled to \
the phase; up to {DRIFT // 2**20} MiB counts as flat. Growth of every other count is the difference; only 0 is flat.

""" + "\n".join(table(head, rows, "llrrrl"))


def main(command: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="of training")
    parser.add_argument("--cycles", type=int, default=500, help="of patching and unpatching")
    parser.add_argument("--generations", type=int, default=200)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there, as Markdown")
    args = parser.parse_args(command)
    start, grown = time.perf_counter(), []
    gc.collect()
    gc.freeze()  # what the imports made is not counted, nor walked through at each point
    with tempfile.TemporaryDirectory() as folder:
        phases = {
            "training": (args.steps, lambda: training(Path(folder))),
            "patching": (args.cycles, patching),
            "generation": (args.generations, generating),
        }
        for phase, (count, make) in phases.items():
            grown += soak(phase, count, make())
    publish(page(grown, time.perf_counter() - start), args.out)
    return int(any(one.grows for one in grown))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
