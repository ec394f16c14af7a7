"""Benchmark attention with norms, RoPE and a cap on a GPU beside torch's SDPA without them: time, memory, errors.

    python recipes/benchmarks/bench_attention.py --minutes 8
    python recipes/benchmarks/bench_attention.py --cpu

Each implementation is first checked against the oracle in fp64 on a short text; ours must pass. Then all take turns on
random data that no cache holds. Ratios are to SDPA with FlashAttention in the same turns. TFLOP/s count useful work:
half the square for a causal forward pass, and 2.5 times that for backward. Memory is the peak above the inputs; for a
backward pass it has the forward pass. An implementation that can't run has a row with the reason. Rows are appended to
a CSV as they come. `--cpu` runs a tiny case in Triton's interpreter; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from page import provenance, publish, table
from timing import Clock, Run, reason
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_qknorm.ops import library, reference
from hf_qknorm.ops.error_budget import Verdict, verdict
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible

EPS, SOFTCAP, CHECKED, TURNS = 1e-6, 50.0, 512, 15
PASSES = {"forward": 1.0, "backward": 2.5, "both": 3.5}  # and their work beside that of the forward pass
HEAD = ("case", "what", "pass", "ms", "min", "max", "host ms", "TFLOP/s", "ratio", "MiB", "error", "note")


@dataclass(frozen=True)
class Case:
    """A causal shape."""

    heads: int
    heads_kv: int
    head_dim: int
    length: int
    batch: int = 1

    def __str__(self) -> str:
        return f"{self.heads}/{self.heads_kv}×{self.head_dim}, {self.batch} × {self.length:,}"

    def size(self, itemsize: int) -> int:
        """Bytes of queries, keys and values."""
        return self.batch * (self.heads + 2 * self.heads_kv) * self.length * self.head_dim * itemsize


class Inputs(NamedTuple):
    """The inputs of every implementation; angles `[1, T, D]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    q_gain: Tensor
    k_gain: Tensor
    cos: Tensor
    sin: Tensor

    def leaves(self, names: tuple[str, ...]) -> Inputs:
        """The inputs, detached; those in `names` require gradients."""
        fields = self._asdict().items()
        return Inputs(*(x.detach().requires_grad_(name in names) for name, x in fields))


def draw(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random inputs, with heads laid out as projections leave them."""
    generator = torch.Generator(device).manual_seed(seed)
    random = partial(torch.randn, device=device, dtype=dtype, generator=generator)
    counts = (case.heads, case.heads_kv, case.heads_kv, case.heads)
    heads = [random(case.batch, case.length, count, case.head_dim).transpose(1, 2) for count in counts]
    gains = [random(case.head_dim).mul(0.1).add(1) for _ in range(2)]
    steps = 10_000.0 ** -(torch.arange(0, case.head_dim, 2, device=device) / case.head_dim)
    angles = torch.cat([torch.arange(case.length, device=device)[:, None] * steps] * 2, -1)[None]
    return Inputs(*heads, *gains, angles.cos().to(dtype), angles.sin().to(dtype))


@dataclass(frozen=True)
class Implementation:
    """One implementation; ours has norms, RoPE and perhaps a cap, the others have neither."""

    name: str
    attend: Callable[[Inputs], Tensor]
    softcap: float | None = None

    @property
    def ours(self) -> bool:
        return self.name.startswith("ours")

    @property
    def leaves(self) -> tuple[str, ...]:
        """The inputs that require gradients."""
        return ("q", "k", "v", "q_gain", "k_gain") if self.ours else ("q", "k", "v")


def ours(x: Inputs, *, softcap: float | None = None) -> Tensor:
    half = x.cos.shape[-1] // 2
    norms = Norm("rms", x.q_gain, eps=EPS), Norm("rms", x.k_gain, eps=EPS)
    heads = Heads(x.q, x.k, x.v, *norms, Rotary(x.cos[..., :half], x.sin[..., :half]))
    return library.fused_attention(heads, Visible(), Options(x.q.shape[-1] ** -0.5, softcap, causal=True))


def sdpa(x: Inputs, *, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        grouped = x.q.shape[1] != x.k.shape[1]
        return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True, enable_gqa=grouped)


FLASH = Implementation("SDPA flash, plain", partial(sdpa, backend=SDPBackend.FLASH_ATTENTION))
CUDNN = Implementation("SDPA cuDNN, plain", partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION))
OURS = Implementation("ours: norm, RoPE, cap", partial(ours, softcap=SOFTCAP), SOFTCAP)
UNCAPPED = Implementation("ours: norm, RoPE", ours)
COMPARED = (FLASH, OURS, UNCAPPED, CUDNN)
SHAPES = ((32, 8, 128), (32, 8, 64), (8, 4, 256), (16, 16, 96))
CASES = [Case(*shape, 4096, 4) for shape in SHAPES] + [Case(32, 8, 128, n, 16_384 // n) for n in (1024, 16_384)]
TINY = [Case(2, 1, 16, 40)]


def results(attend: Callable[[Inputs], Tensor], x: Inputs, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The output and the gradients of `names`."""
    x = x.leaves(names)
    out = attend(x)
    gradients = torch.autograd.grad(out, [getattr(x, name) for name in names], x.grad)
    return {"out": out.detach(), **{f"d{name}": y for name, y in zip(names, gradients, strict=True)}}


def check(implementation: Implementation, case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Verdict]:
    """The errors of the output and the gradients on a short text, and their budgets."""

    def oracle(x: Inputs) -> Tensor:
        q, k = x.q, x.k
        if implementation.ours:
            q, k = (reference.head_norm(y, "rms", gain, eps=EPS) for y, gain in ((q, x.q_gain), (k, x.k_gain)))
            q, k = apply_rotary_pos_emb(q, k, x.cos, x.sin)
        return reference.attention(q, k, x.v, softcap=implementation.softcap, causal=True).out

    x = draw(replace(case, batch=2, length=CHECKED if device.type == "cuda" else 48), device, dtype)
    names, exact = implementation.leaves, Inputs(*(y.double() for y in x))
    true, eager = results(oracle, exact, names), results(oracle, x, names)
    return {name: verdict(y, true[name], eager[name]) for name, y in results(implementation.attend, x, names).items()}


class Passes:
    """An implementation's passes over sets of inputs; pass n uses the n-th."""

    def __init__(self, implementation: Implementation, sets: list[Inputs]) -> None:
        self.attend, self.names = implementation.attend, implementation.leaves
        self.sets = [x.leaves(self.names) for x in sets]
        self.outputs: dict[int, Tensor] = {}

    def forward(self, n: int) -> None:
        with torch.no_grad():
            self.attend(self.sets[n % len(self.sets)])

    def both(self, n: int) -> None:
        x = self.sets[n % len(self.sets)]
        torch.autograd.grad(self.attend(x), [getattr(x, name) for name in self.names], x.grad)

    def backward(self, n: int) -> None:
        """Over the graph of a forward pass that is kept."""
        n %= len(self.sets)
        x = self.sets[n]
        if n not in self.outputs:
            self.outputs[n] = self.attend(x)
        torch.autograd.grad(self.outputs[n], [getattr(x, name) for name in self.names], x.grad, retain_graph=True)


def measure(case: Case, clock: Clock, dtype: torch.dtype) -> Iterator[list[str]]:
    """The rows of a case. Raises AssertionError if an implementation of ours is not within its budget."""
    errors: dict[str, dict[str, Verdict]] = {}
    for implementation in COMPARED:
        try:
            errors[implementation.name] = check(implementation, case, clock.device, dtype)
        except Exception as error:  # of another library: a row with the reason
            if implementation.ours:
                raise AssertionError(f"{case}, {implementation.name}: {reason(error)}") from error
            yield [str(case), implementation.name, *[""] * 9, reason(error)]
            continue
        over = {name: x for name, x in errors[implementation.name].items() if not x.passed}
        assert not (over and implementation.ours), f"{case}, {implementation.name}: over the error budget: {over}"
    sets = [draw(case, clock.device, dtype, seed) for seed in range(clock.copies(case.size(dtype.itemsize)))]
    for kind in PASSES:
        passes = {x.name: Passes(x, sets) for x in COMPARED if x.name in errors}
        runs = {name: Run(getattr(x, kind), x.both if kind == "backward" else None) for name, x in passes.items()}
        clock.race(runs, TURNS if clock.cuda else 2)
        for name, run in runs.items():
            yield cells(case, name, kind, run, runs.get(FLASH.name), errors[name])


def cells(case: Case, name: str, kind: str, run: Run, base: Run | None, errors: dict[str, Verdict]) -> list[str]:
    if run.failure:
        return [str(case), name, kind, *[""] * 8, run.failure]
    flop = PASSES[kind] * 2 * case.batch * case.length**2 * case.heads * case.head_dim
    host, ratio = sorted(run.host)[len(run.host) // 2], ""
    if base is not None and not base.failure:
        ratio = f"{run.median / base.median:.2f}"
    times = [f"{x:.4f}" for x in (run.median, min(run.times), max(run.times), host)]
    worst = max(x.error for n, x in errors.items() if kind == "both" or (n == "out") == (kind == "forward"))
    peak = "" if run.peak_mib is None else f"{run.peak_mib:.0f}"
    return [str(case), name, kind, *times, f"{flop / 1e9 / run.median:.3g}", ratio, peak, f"{worst:.1e}", ""]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=8, help="no case starts after that (default: 8)")
    parser.add_argument("--cpu", action="store_true", help="a tiny case, in Triton's interpreter")
    parser.add_argument("--out", type=Path, default=Path("attention"), help="CSV and page, without the ending")
    args = parser.parse_args(arguments)
    if args.cpu and os.environ.get("TRITON_INTERPRET") != "1":  # read when Triton is imported, as it is by now
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"TRITON_INTERPRET": "1"})
    if not args.cpu and not torch.cuda.is_available():
        print("bench_attention.py needs a CUDA GPU; --cpu tries it out without one", file=sys.stderr)
        return 2
    device, dtype = (torch.device("cpu"), torch.float32) if args.cpu else (torch.device("cuda"), torch.bfloat16)
    end, rows, notes = time.monotonic() + 60 * args.minutes, [], []
    where = f"{dtype}; {provenance()}"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*HEAD, "made"])
        for case in TINY if args.cpu else CASES:
            if time.monotonic() > end:
                notes.append(f"- no time for {case}")
                continue
            try:
                for row in measure(case, Clock(device), dtype):
                    rows.append(row)
                    writer.writerow([*row, where])
                    file.flush()
            except AssertionError as error:
                notes.append(f"- failed: {error}")
    publish("Attention", __doc__, where, [*notes, "", *table(HEAD, rows, "lll" + "r" * 8 + "l")], args.out)
    return int(any("failed" in note for note in notes))


if __name__ == "__main__":
    sys.exit(main())
