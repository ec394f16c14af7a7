"""Benchmark the host's time of one attention layer, without a GPU, beside transformers' SDPA layer.

    python recipes/benchmarks/bench_host.py --output recipes/results/host.md

A layer is a `LlamaAttention` of few columns, so that the time is that of Python and of the dispatch of operators. All
layers take their turns in one process; the figure is the CPU time of the thread, on which other programs have the least
effect.

The first row of each kind of work is the least that every layer does: the four projections, three views, and the
copy in front of the last projection. A layer's time beyond this row is that of attention: norms, RoPE, cache, checks
and launches.

Counted: the layer's modules, checks, the dispatch and allocations of torch's operators, the kernels' arguments, and
Triton's own specialisation of arguments and cache of kernels. Not counted, as there is no GPU: for each launch, of our
kernels and of torch's, the driver's call; the encoding of tensor descriptors by Triton's launcher; the choice of the
current device. Operators of torch compute on the CPU instead, with few numbers.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import triton
from bench_tiled import busy_seconds, commit, cpu_name
from compiled import Target
from markdown_table import publish
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from hf_qknorm import patch_model
from hf_qknorm.backends import implementations
from hf_qknorm.families.style import CACHE
from hf_qknorm.ops import fused_checks
from hf_qknorm.ops.cpu.use import SWITCH

HOPPER = 90
HEADS, HEADS_KV, HEAD_DIM, ROOM = 2, 1, 16, 512  # the last is the keys of a cache, of which half are there before
CALLS, TURNS = 20, 100  # calls of a turn
WARM = 10  # calls before these, after another layer's code: a model's layers follow their like
LAYERS = {  # scheme and attention function
    "SDPA": (None, "sdpa"),
    "RMSNorm, SDPA": ("qk_norm", "sdpa"),
    "hf_qknorm, norms": ("qk_norm", "hf_qknorm_triton"),
    "hf_qknorm, norms and cap": ("qk_norm_cap", "hf_qknorm_triton"),
}
LEAST = "projections alone"
WORK = ("decode, static cache", "decode, dynamic cache", "training, forward", "training, forward and backward")


class Launches:
    """Counts the kernels that are launched, and starts none."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    @contextmanager
    def stubbed(self) -> Iterator[None]:
        """A context in which kernels are compiled for Hopper, and not started."""
        active, load = driver._active, CompiledKernel._init_handles
        here, positions = fused_checks._why_not_here, fused_checks.check_positions
        on_cpu = implementations.KERNELS_ON_CPU
        driver.set_active(Target(HOPPER))
        CompiledKernel._init_handles = lambda kernel: self._load(kernel)
        implementations.KERNELS_ON_CPU = True
        switch = os.environ.get(SWITCH)
        os.environ[SWITCH] = "0"  # a GPU has no C++ kernels
        fused_checks._why_not_here = lambda device: None
        fused_checks.check_positions = lambda positions, room: None  # a GPU's kernel checks them
        try:
            yield
        finally:
            driver._active, CompiledKernel._init_handles = active, load
            fused_checks._why_not_here, fused_checks.check_positions = here, positions
            implementations.KERNELS_ON_CPU = on_cpu
            if switch is None:
                del os.environ[SWITCH]
            else:
                os.environ[SWITCH] = switch

    def _load(self, kernel: CompiledKernel) -> None:
        """In the place of `CompiledKernel._init_handles`, which needs a GPU."""
        kernel._run = partial(self._start, kernel.name)

    def _start(self, name: str, *arguments: Any) -> None:
        self.count[name] += 1


def layer(scheme: str | None, attention: str) -> tuple[nn.Module, LlamaConfig]:
    """A Llama's attention layer in bf16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS_KV,
        head_dim=HEAD_DIM,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    if scheme is not None:
        patch_model(model, scheme)  # checks outputs, which stubbed kernels do not compute
    model.set_attn_implementation(attention)
    return model.model.layers[0].self_attn, model.config


def calls_of(scheme: str | None, attention: str) -> dict[str, Callable[[], Any]]:
    """A call of a layer for each kind of work."""
    module, config = layer(scheme, attention)

    def inputs(length: int) -> dict[str, Any]:
        angles = (torch.zeros(1, length, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))
        hidden = torch.randn(1, length, HEADS * HEAD_DIM, dtype=torch.bfloat16)
        return {"hidden_states": hidden, "position_embeddings": tuple(angles), "attention_mask": None}

    static, dynamic = StaticCache(config=config, max_cache_len=ROOM), DynamicCache(config=config)
    keys = torch.zeros(1, HEADS_KV, ROOM // 2, HEAD_DIM, dtype=torch.bfloat16)
    for cache in (static, dynamic):
        cache.update(keys, keys, 0)
    growing = dynamic.layers[0]
    # the mask of a static cache, as each layer's mask function makes it: once a step, for all layers
    ranges = torch.tensor([[[[0, ROOM // 2 + 1]]]], dtype=torch.int32)
    seen = torch.zeros(1, 1, 1, ROOM, dtype=torch.bool)
    step, text = inputs(1), inputs(8)
    masked = step | {"attention_mask": ranges if attention.startswith("hf_qknorm") else seen}

    @torch.no_grad()
    def decode_static() -> None:
        module(**masked, **{CACHE: static})
        static.layers[0].cumulative_length.fill_(ROOM // 2)

    @torch.no_grad()
    def decode_dynamic() -> None:
        module(**step, **{CACHE: dynamic})
        if growing.keys.shape[2] == ROOM:
            growing.keys = growing.values = keys

    def forward() -> Tensor:
        out: Tensor = module(**text)[0]
        return out

    def train() -> None:
        forward().backward(gradient)

    gradient = torch.ones(1, 8, HEADS * HEAD_DIM, dtype=torch.bfloat16)
    return dict(zip(WORK, (decode_static, decode_dynamic, forward, train), strict=True))


def projections() -> dict[str, Callable[[], Any]]:
    """A call of the projections alone for each kind of work."""
    module, _ = layer(None, "sdpa")

    def project(length: int) -> list[Tensor]:
        hidden = torch.randn(1, length, HEADS * HEAD_DIM, dtype=torch.bfloat16)
        shape = (1, length, -1, HEAD_DIM)
        q, k, v = (module.get_submodule(f"{x}_proj")(hidden).view(shape).transpose(1, 2) for x in "qkv")
        out: Tensor = module.get_submodule("o_proj")(q.transpose(1, 2).reshape(1, length, -1).contiguous())
        return [out, k, v]

    def train() -> None:
        results = project(8)
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])

    step, text = torch.no_grad()(partial(project, 1)), partial(project, 8)
    return dict(zip(WORK, (step, step, text, train), strict=True))


class Time(NamedTuple):
    """Microseconds of a call: the median over turns, and the quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Time:
        low, median, high = (1e6 * x for x in statistics.quantiles(seconds, n=4))
        return cls(median, low, high)


def measure(calls: dict[str, Callable[[], Any]], turns: int) -> dict[str, Time]:
    """The time of each call, by turns."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            for _ in range(WARM):
                call()
            start = time.thread_time()
            for _ in range(CALLS):
                call()
            seconds[name].append((time.thread_time() - start) / CALLS)
    return {name: Time.of(spent) for name, spent in seconds.items()}


def launches_of(call: Callable[[], Any], launches: Launches) -> dict[str, int]:
    """The kernels of one call, by name."""
    call()
    launches.count.clear()
    call()
    return dict(launches.count)


def table(turns: int, kinds: Sequence[str]) -> list[str]:
    """Rows of Markdown: the time of each layer for each kind of work, beside other layers', and its launches."""
    launches, rows = Launches(), []
    with launches.stubbed():
        made = {LEAST: projections()} | {name: calls_of(*how) for name, how in LAYERS.items()}
        for work in kinds:
            calls = {name: of[work] for name, of in made.items()}
            times = measure(calls, turns)
            for name, spent in times.items():
                started = ", ".join(f"{n} {kernel}" for kernel, n in launches_of(calls[name], launches).items())
                ratio, beyond = spent.median / times["SDPA"].median, spent.median - times[LEAST].median
                figures = f"{spent.median:.0f} | {spent.low:.0f} to {spent.high:.0f} | {ratio:.2f} | {beyond:.0f}"
                rows.append(f"| {work} | {name} | {figures} | {started or 'none'} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of {CALLS} calls of each layer")
    parser.add_argument("--work", choices=WORK, action="append", help="a kind of work; default: all")
    parser.add_argument("--output", type=Path, help="a Markdown file; default: print")
    args = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("kernels are interpreted: unset TRITON_INTERPRET")
    torch.set_num_threads(1)
    (machine, own), start = busy_seconds(), time.monotonic()
    rows = table(args.turns, args.work or WORK)
    (machine_after, own_after), seconds = busy_seconds(), time.monotonic() - start
    others = max(machine_after - machine - own_after + own, 0) / seconds
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Triton {triton.__version__}"
    turns = "" if args.turns == TURNS else f" --turns {args.turns}"
    turns += "".join(f' --work "{kind}"' for kind in args.work or ())
    page = [
        "# The host's time of an attention layer",
        "",
        f"`python recipes/benchmarks/bench_host.py{turns} --output recipes/results/host.md`",
        "",
        f"{cpu_name()}, 1 of {os.cpu_count()} CPUs (other programs used {others:.2f} CPUs), {versions}, Python "
        f"{platform.python_version()}, commit {commit()}, {datetime.date.today()}.",
        "",
        f"A Llama's attention layer in bf16, batch 1, {HEADS} heads of {HEAD_DIM} on {HEADS_KV} key head: a token over "
        f"{ROOM // 2} keys (up to {ROOM} with a dynamic cache), or a text of 8 tokens. CPU time of the thread, "
        f"{args.turns} turns of {CALLS} calls. The first row of each kind of work has the projections, three views and "
        "the output's copy alone, which are part of every layer: a layer's time beyond it is that of its attention. "
        "There is no GPU: the script's docstring says what is not counted.",
        "",
        "| work | layer | µs: median | quartiles | of SDPA's | µs beyond the projections | kernels of hf_qknorm |",
        "|---|---|---:|---:|---:|---:|---|",
        *rows,
    ]
    publish("\n".join(page), args.output)


if __name__ == "__main__":
    main()
