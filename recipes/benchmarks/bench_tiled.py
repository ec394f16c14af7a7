"""Benchmark the tiled attention on the CPU against eager attention and torch's uncapped SDPA: time and memory.

    python recipes/benchmarks/bench_tiled.py --output recipes/results/tiled_cpu.md

All times come from one run in which the three take turns; each ratio is one of times from the same turn. Threads that
wait for each other suffer from other programs: run the benchmark on a quiet machine. The page says how busy other
programs were. A second run has a neighbour, a process that keeps one core busy. Memory is the rise of the resident size
of a fresh process over forward and backward (VmHWM, reset before, so Linux only; ru_maxrss cannot be reset). Unlike a
profiler's sum of tensors it includes the work space of the matrix libraries.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import test_helpers_path  # noqa: F401
import torch
import torch.nn.functional as F
from error_budget import assert_within_budget
from markdown_table import publish
from random_qkv import make_qkv
from torch import Tensor

from hf_qknorm.ops import library, reference
from hf_qknorm.ops.types import Heads, Options, Visible

MEMORY_LENGTH = 4096
OURS, EAGER, SDPA = "hf_qknorm, tiled", "eager", "SDPA, no cap"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def implementations(length: int, softcap: float) -> dict[str, Attention]:
    """The three implementations, all causal."""
    hidden = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return library.attention(Heads(q, k, v), Visible(), Options(q.shape[-1] ** -0.5, softcap, causal=True))

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # as Gemma 2's in transformers
        logits = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
        logits = torch.tanh(logits / softcap) * softcap + hidden
        return torch.matmul(torch.softmax(logits, dim=-1), v)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return {OURS: ours, EAGER: eager, SDPA: sdpa}


def check(inputs: tuple[Tensor, ...], softcap: float) -> None:
    """Raise AssertionError unless output and gradients are within the error budget."""

    def results(attend: Attention, dtype: torch.dtype) -> tuple[Tensor, ...]:
        tensors = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = attend(*tensors)
        return out.detach(), *torch.autograd.grad(out.sin().sum(), tensors)

    def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, softcap=softcap, causal=True).out

    got = results(implementations(1, softcap)[OURS], torch.float32)
    exact, eager = results(oracle, torch.float64), results(oracle, torch.float32)
    for name, *three in zip(("out", "dq", "dk", "dv"), got, exact, eager, strict=True):
        assert_within_budget(*three, name)


def forward(attend: Attention, inputs: tuple[Tensor, ...]) -> None:
    with torch.no_grad():
        attend(*inputs)


def forward_backward(attend: Attention, inputs: tuple[Tensor, ...]) -> None:
    out = attend(*inputs)
    torch.autograd.grad(out, inputs, out.detach())


def timed(run: Callable[[Attention, tuple[Tensor, ...]], None], args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the milliseconds of each implementation, taken by turns."""
    inputs = make_qkv(1, args.heads, args.heads, args.length, args.length, args.head_dim)
    compared = implementations(args.length, args.softcap)
    times: dict[str, list[float]] = {name: [] for name in compared}
    for turn in range(-2, args.reps):
        for name, attend in compared.items():
            start = time.perf_counter()
            run(attend, inputs)
            if turn >= 0:  # the first two warm up
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def busy_seconds() -> tuple[float, float]:
    """Return the CPU seconds of the whole machine, and of this process."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    spent = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return spent, time.process_time()


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that computes without end, in one thread."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def status_mib(field: str) -> float:
    """Return a size that Linux keeps for this process: VmRSS (resident), or VmHWM (its peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**10


def measure_memory(name: str, args: argparse.Namespace) -> None:
    """Print the rise of the resident size over forward and backward in MiB; needs a process of its own."""
    small = make_qkv(1, args.heads, args.heads, 64, 64, args.head_dim)
    forward_backward(implementations(64, args.softcap)[name], small)  # libraries and threads are set up
    inputs = make_qkv(1, args.heads, args.heads, MEMORY_LENGTH, MEMORY_LENGTH, args.head_dim)
    attend = implementations(MEMORY_LENGTH, args.softcap)[name]
    ctypes.CDLL(None).malloc_trim(0)  # freed memory would be used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status_mib("VmRSS")
    forward_backward(attend, inputs)
    print(status_mib("VmHWM") - before)


def memory(name: str, arguments: list[str]) -> float:
    """Return the rise in MiB, from a fresh process."""
    command = [sys.executable, __file__, *arguments, "--memory-of", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def commit(measured: str = "hf_qknorm/ops") -> str:
    """Return the commit, marked dirty if the measured code differs from it."""

    def git(*command: str) -> str:
        root = Path(__file__).parents[2]
        return subprocess.run(["git", "-C", root, *command], check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + ("-dirty" if git("status", "-s", measured) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def ratio(times: list[float], others: list[float]) -> str:
    """Return the first over the second: the median over the turns, and fastest over fastest."""
    turns = [mine / other for mine, other in zip(times, others, strict=True)]
    return f"{statistics.median(turns):.2f}× (fastest: {min(times) / min(others):.2f}×)"


def report(args: argparse.Namespace, arguments: list[str]) -> str:
    """Measure everything; return a Markdown page."""
    (machine, own), start = busy_seconds(), time.perf_counter()
    results = {"forward": timed(forward, args), "forward + backward": timed(forward_backward, args)}
    machine, own = (after - before for after, before in zip(busy_seconds(), (machine, own), strict=True))
    others = max(machine - own, 0) / (time.perf_counter() - start)
    with neighbour():
        busy = timed(forward_backward, args)
    extra = {name: memory(name, arguments) for name in (OURS, EAGER, SDPA)}
    lines = [
        "# Tiled attention on the CPU",
        "",
        f"`python recipes/benchmarks/bench_tiled.py {' '.join(arguments)}`".rstrip(),
        "",
        f"{cpu_name()}, {args.threads} threads of {os.cpu_count()} (other programs used {others:.2f} CPUs during "
        f"the timings), torch {torch.__version__}, Python {platform.python_version()}, commit {commit()}, "
        f"{datetime.date.today()}.",
        "",
        f"fp32, causal, batch 1, {args.heads} heads, head_dim {args.head_dim}, length {args.length}; a "
        f"cap of {args.softcap:g} in all but SDPA, which has none. {args.reps} runs each, by turns. All are checked "
        "against the oracle first.",
        "",
        "| milliseconds | median | min | max |",
        "|---|---:|---:|---:|",
    ]
    for what, times in results.items():
        for name, runs in times.items():
            lines.append(f"| {what}: {name} | {statistics.median(runs):.1f} | {min(runs):.1f} | {max(runs):.1f} |")
    lines.append("")
    for what, times in results.items():
        lines.append(
            f"- {what}: eager takes {ratio(times[EAGER], times[OURS])} the time of hf_qknorm, which takes "
            f"{ratio(times[OURS], times[SDPA])} SDPA's."
        )
    lines += ["", "Beside a process that keeps one core busy:", ""]
    lines += [
        "| forward + backward, milliseconds | median | min | max | times the median above |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, runs in busy.items():
        median = statistics.median(runs)
        slower = median / statistics.median(results["forward + backward"][name])
        lines.append(f"| {name} | {median:.1f} | {min(runs):.1f} | {max(runs):.1f} | {slower:.2f} |")
    lines += ["", f"| extra memory, forward + backward, length {MEMORY_LENGTH} | MiB |", "|---|---:|"]
    lines += [f"| {name} | {mib:.0f} |" for name, mib in extra.items()]
    lines += ["", f"Eager takes {extra[EAGER] / extra[OURS]:.1f}× the extra memory of hf_qknorm."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--reps", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--softcap", type=float, default=50.0)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the Markdown there as well")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        measure_memory(args.memory_of, args)
        return
    check(make_qkv(1, args.heads, args.heads, args.length, args.length, args.head_dim), args.softcap)
    page = report(args, sys.argv[1:])
    publish(page, args.output)


if __name__ == "__main__":
    main()
