"""Benchmark attention on the CPU with norms, RoPE and a cap, beside torch's SDPA without a cap, and a small Llama.

    python recipes/benchmarks/bench_cpu.py --output cpu.md

Causal, batch 1, 8 heads; a cap of 50 in all but SDPA, which has none. The implementations take turns in one process.
Times are medians (fastest to slowest), ratios medians within the turns (quartiles), so that a slow moment of the
machine is in both. Threads that wait for each other suffer from other programs: run it on a quiet machine; the page
says how busy others were. With ATEN_CPU_CAPABILITY=avx2 it measures AVX2, but for SDPA's matrix products in MKL and
oneDNN, which keep AVX-512.

The Llama has 4 layers, 512 wide, with 8 heads of 64; for generation 256 wide, with 4 heads. Generation takes ten steps
over a cache, which is then cut back. A peak is that of a training step of 4,096 tokens above the resident size before
it, in a process for each model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from page import provenance, publish, table
from timing import Times, Work, beside_others, by_turns, cell, peak_rise, ratio_cell
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import hf_qknorm as qk
from hf_qknorm.families.style import CACHE
from hf_qknorm.ops import library
from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.cpu import norm_rope
from hf_qknorm.ops.types import Call, Heads, Norm, Options, Rotary, Visible

HEADS, CAP = 8, 50.0
CPP, SDPA, TILED = "C++, cap", "SDPA, no cap", "tiled, cap"
NORMED, ROTATED = "C++, norms, RoPE, cap", "SDPA, RoPE"
PLAIN = "unpatched, sdpa"
MODELS = {  # scheme and backend
    "norms and cap, hf_qknorm": ("qk_norm_cap", "hf_qknorm"),
    "norms, hf_qknorm": ("qk_norm", "hf_qknorm"),
    "norms, sdpa": ("qk_norm", "sdpa"),
    PLAIN: (None, "sdpa"),
}
GENERATED, CACHED, PEAK_LENGTH = 10, (256, 4096), 4096


class Row(NamedTuple):
    """A measured shape, and its implementations."""

    length: int
    head_dim: int
    dtype: torch.dtype
    names: tuple[str, ...] = (CPP, SDPA)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.length:,} tokens, head_dim {self.head_dim}, {dtype}"


F32, BF16 = torch.float32, torch.bfloat16
ALL = (CPP, SDPA, TILED)
ROWS = (
    Row(512, 64, F32),
    Row(1024, 64, F32, ALL),
    Row(1024, 128, F32),
    Row(4096, 64, F32, ALL),
    Row(4096, 128, F32),
    Row(1024, 64, BF16),
    Row(4096, 64, BF16),
)
ROTATED_LENGTHS = (512, 1024, 4096)


def implementations() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """All causal; "tiled" is what serves without a C++ compiler."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Call:
        return Call(Heads(q, k, v), Visible(), Options(q.shape[-1] ** -0.5, CAP, causal=True))

    return {
        CPP: lambda q, k, v: cpu.attention(call(q, k, v)),
        SDPA: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        TILED: lambda q, k, v: library.attention(*call(q, k, v)),
    }


def draw(length: int, head_dim: int, dtype: torch.dtype = F32) -> tuple[Tensor, ...]:
    """Random q, k and v `[1, H, T, D]`, with gradients."""
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(1, HEADS, length, head_dim, generator=generator) for _ in range(3))
    return tuple(x.to(dtype).requires_grad_() for x in made)


def rotated_times(length: int, turns: int) -> Times:
    """Forward and backward with RoPE and, in C++, norms with gains, as a patched Llama trains."""
    compared = implementations()
    rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=64))
    q, k, v = draw(length, 64)
    positions = rotary(q, torch.arange(length)[None])
    angles = Rotary(*(x[..., :32] for x in positions))
    gains = [torch.ones(64, requires_grad=True) for _ in range(2)]

    def normed(q: Tensor, k: Tensor, v: Tensor, *gains: Tensor) -> Tensor:
        q_norm, k_norm = (Norm("rms", gain) for gain in gains)
        return compared[CPP](*norm_rope.norm_rope(Heads(q, k, v, q_norm, k_norm, angles)), v)

    def rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compared[SDPA](*apply_rotary_pos_emb(q, k, *positions), v)

    ours, theirs = (q, k, v, *gains), (q, k, v)
    runs = {NORMED: lambda: forward_backward(normed, ours), ROTATED: lambda: forward_backward(rotated, theirs)}
    return by_turns(runs, turns)


def forward_backward(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    out = attend(*inputs)
    torch.autograd.grad(out, inputs, out.detach())


def attention_times(row: Row, turns: int) -> Times:
    """Forward and backward of each implementation."""
    inputs = draw(row.length, row.head_dim, row.dtype)
    compared = implementations()
    runs = {name: lambda name=name: forward_backward(compared[name], inputs) for name in row.names}
    return by_turns(runs, turns)


def llama(name: str, width: int = 512, heads: int = 8) -> Any:
    """One of `MODELS`, with the same weights as the others."""
    scheme, backend = MODELS[name]
    sizes = {"hidden_size": width, "intermediate_size": width * 8 // 3, "num_attention_heads": heads, "head_dim": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=heads // 2, vocab_size=2048)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    return model if scheme is None else qk.patch_model(model, scheme, attn_implementation=backend)


def draw_tokens(*shape: int, vocabulary: int = 2048) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))


def training_step(model: Any, tokens: Tensor) -> Work:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@torch.no_grad()
def generation(model: Any, tokens: Tensor) -> Work:
    """A function that takes `GENERATED` steps over the keys of these tokens."""
    cache = DynamicCache(config=model.config)
    forward = partial(model, use_cache=True, logits_to_keep=1, **{CACHE: cache})
    forward(tokens)

    @torch.no_grad()
    def run() -> None:
        for _ in range(GENERATED):
            forward(tokens[:, :1])
        cache.crop(-GENERATED)

    return run


def long_step(name: str, checkpointed: bool) -> Work:
    """A training step of a long text, by an optimiser that has its state."""
    model = llama(name).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    training_step(model, draw_tokens(1, 64))()
    return training_step(model, draw_tokens(1, PEAK_LENGTH))


def ratio_table(title: str, measured: dict[Any, Times], base: str) -> list[str]:
    """The times of each implementation, and their ratios to those of `base`."""
    rows = []
    for shape, times in measured.items():
        rows += [
            [str(shape), name, cell(own), "" if name == base else ratio_cell(own, times[base])]
            for name, own in times.items()
        ]
    return table([title, "", "ms", f"÷ {base}"], rows, "llrr")


def peaks() -> list[str]:
    """The table of the peaks of a training step, without gradient checkpointing and with it."""
    rows = [[name, *(peak_rise(partial(long_step, name, kept)) for kept in (False, True))] for name in MODELS]
    base = rows[-1]
    cells = [[name, *(f"{x:,} ({x / y:.2f})" for x, y in zip(mib, base[1:], strict=True))] for name, *mib in rows]
    head = [f"peak of a step, 1 × {PEAK_LENGTH:,} tokens", "MiB", "with gradient checkpointing, MiB"]
    return table(head, cells)


def measure(turns: int) -> list[str]:
    """The tables of attention, of attention with RoPE, of training steps, of generation, and of memory."""
    attention = {row: attention_times(row, turns if row.length <= 1024 else 5) for row in ROWS}
    rotated = {f"{n:,} tokens": rotated_times(n, turns if n <= 1024 else 5) for n in ROTATED_LENGTHS}
    steps = {name: training_step(llama(name).train(), draw_tokens(2, 512)) for name in MODELS}
    generated = {
        f"{GENERATED} steps over {keys:,} keys": by_turns(
            {name: generation(llama(name, 256, 4).eval(), draw_tokens(1, keys)) for name in MODELS}, 4 * turns
        )
        for keys in CACHED
    }
    return [
        *ratio_table("attention, forward and backward", attention, SDPA),
        *ratio_table("with RoPE, head_dim 64, fp32", rotated, ROTATED),
        *ratio_table("training step of a Llama", {"2 × 512 tokens": by_turns(steps, turns)}, PLAIN),
        *ratio_table("generation", generated, PLAIN),
        *peaks(),
    ]


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the Markdown there as well")
    args = parser.parse_args(arguments)
    tables, busy = beside_others(lambda: measure(args.turns))
    about = f"{args.turns} turns (5 for 4,096 tokens). {busy}; {provenance()}"
    return publish("Attention on the CPU", __doc__, about, tables, args.output)


if __name__ == "__main__":
    main()
