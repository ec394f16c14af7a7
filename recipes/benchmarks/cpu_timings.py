"""The timings of `bench_cpu.py`: the contestants, the sizes, and the limits, set before the first run."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import test_helpers_path  # noqa: F401
import torch
import torch.nn.functional as F
from error_budget import assert_within_budget
from machine import Times, by_turns
from random_qkv import make_qkv
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import hf_qknorm as qk
from hf_qknorm.ops import library, reference
from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.types import Heads, Options, Visible

HEADS, CAP = 8, 50.0
CPP, SDPA, EAGER, TILED = "C++, cap", "SDPA, no cap", "eager, cap", "tiled, cap"
NORMED, ROTATED = "C++, norms, RoPE, cap", "SDPA, RoPE"
PATCHED, NORMS, PLAIN = "patched, norms and cap", "patched, norms", "unpatched"


class Row(NamedTuple):
    """A measured shape, and the largest C++ ÷ SDPA that is allowed for it."""

    length: int
    head_dim: int
    dtype: torch.dtype
    limit: float
    names: tuple[str, ...] = (CPP, SDPA)
    busy: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.length:,} tokens, head_dim {self.head_dim}, {dtype}" + (", a busy core" if self.busy else "")


F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
LIMITS = (
    Row(512, 64, F32, 0.85),
    Row(1024, 64, F32, 0.75, (CPP, SDPA, EAGER, TILED)),
    Row(1024, 128, F32, 0.75),
    Row(4096, 64, F32, 0.90, (CPP, SDPA, EAGER, TILED)),
    Row(4096, 128, F32, 0.90),
    Row(1024, 64, BF16, 1.00),
    Row(4096, 64, BF16, 1.00),
    Row(512, 64, F32, 0.85, busy=True),
    Row(1024, 64, F32, 0.75, (CPP, SDPA, TILED), busy=True),
)
ROTATED_LENGTHS = (512, 1024, 4096)
EAGER_LIMIT, STEP_LIMIT, ROTATED_LIMIT, ONE_QUERY_LIMIT = 6.5, 1.00, 1.00, 1.00


class OneQuery(NamedTuple):
    """A step of generation: a query of each head, over the keys of a cache."""

    heads_kv: int
    keys: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{HEADS} heads on {self.heads_kv} key head{'s' * (self.heads_kv > 1)}, {self.keys:,} keys, {dtype}"


ONE_QUERY = tuple(OneQuery(*sizes, F32) for sizes in itertools.product((8, 2, 1), (256, 1024, 8192)))
ONE_QUERY += tuple(OneQuery(8, keys, BF16) for keys in (256, 8192))
CALLS = 1 << 14  # of a turn, for one key


def implementations(length: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """All causal; the plain one, with a cap, is that of Gemma 2 in transformers."""
    hidden = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
        return torch.matmul(torch.softmax(torch.tanh(logits / CAP) * CAP + hidden, dim=-1), v)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Heads, Visible, Options]:
        return Heads(q, k, v), Visible(), Options(q.shape[-1] ** -0.5, CAP, causal=True)

    return {
        CPP: lambda q, k, v: cpu.attention(*call(q, k, v)),
        SDPA: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        EAGER: eager,
        TILED: lambda q, k, v: library.attention(*call(q, k, v)),
    }


def rotated_times(length: int, turns: int) -> Times:
    """Forward and backward with RoPE and, for the C++ attention, norms with gains, as a patched Llama trains."""
    compared = implementations(length)
    rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=64))
    q, k, v = make_qkv(1, HEADS, HEADS, length, length, 64)
    positions = rotary(q, torch.arange(length)[None])
    gains = [torch.ones(64, requires_grad=True) for _ in range(2)]

    def normed(q: Tensor, k: Tensor, v: Tensor, *gains: Tensor) -> Tensor:
        heads = zip((q, k), gains, strict=True)
        q, k = (reference.head_norm(x.transpose(1, 2), "rms", gain).transpose(1, 2) for x, gain in heads)
        return compared[CPP](*apply_rotary_pos_emb(q, k, *positions), v)

    def rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compared[SDPA](*apply_rotary_pos_emb(q, k, *positions), v)

    ours, theirs = (q, k, v, *gains), (q, k, v)
    runs = {NORMED: lambda: forward_backward(normed, ours), ROTATED: lambda: forward_backward(rotated, theirs)}
    return by_turns(runs, turns)


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that computes without end, in one thread."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def forward_backward(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    out = attend(*inputs)
    torch.autograd.grad(out, inputs, out.detach())


def attention_times(row: Row, turns: int) -> Times:
    """Forward and backward of each implementation, after a check against the oracle."""
    inputs = make_qkv(1, HEADS, HEADS, row.length, row.length, row.head_dim, dtype=row.dtype)
    compared = implementations(row.length)
    for name in {CPP, TILED} & {*row.names}:
        check(row, compared[name])
    runs = {name: lambda name=name: forward_backward(compared[name], inputs) for name in row.names}
    with neighbour() if row.busy else nullcontext():
        return by_turns(runs, turns)


def check(row: Row, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Raise AssertionError unless output and gradients are within the error budget, for 256 tokens."""
    inputs = make_qkv(1, HEADS, HEADS, 256, 256, row.head_dim, dtype=row.dtype)

    def results(attend: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        tensors = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = attend(*tensors)
        return out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out))

    def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, softcap=CAP, causal=True).out

    three = results(attend, row.dtype), results(oracle, torch.float64), results(oracle, row.dtype)
    for name, *result in zip(("out", "dq", "dk", "dv"), *three, strict=True):
        assert_within_budget(*result, name)


@torch.no_grad()
def one_query_times(row: OneQuery, turns: int) -> Times:
    """The milliseconds of a call, from several calls a turn; all of it, with what Python does around the kernel."""
    q, k, v = make_qkv(1, HEADS, row.heads_kv, 1, row.keys, 64, dtype=row.dtype)
    call = Heads(q.detach(), k.detach(), v.detach()), Visible(), Options(64**-0.5, CAP)
    attends = {
        CPP: lambda: cpu.attention(*call),
        SDPA: lambda: F.scaled_dot_product_attention(*call[0][:3], enable_gqa=row.heads_kv < HEADS),
    }
    exact, eager = (reference.attention(*(x.to(y) for x in call[0][:3]), softcap=CAP).out for y in (F64, row.dtype))
    assert_within_budget(attends[CPP](), exact, eager)
    count = max(CALLS // row.keys, 4)
    runs = {name: lambda attend=attend: [attend() for _ in range(count)] for name, attend in attends.items()}
    return {name: [x / count for x in times] for name, times in by_turns(runs, turns).items()}


def step_times(turns: int) -> Times:
    """A training step of a Llama of 4 layers with 8 heads of 64, on 2 texts of 512 tokens."""
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=2048, attn_implementation="sdpa")
    tokens = torch.randint(2048, (2, 512), generator=torch.Generator().manual_seed(0))
    runs: dict[str, Callable[[], object]] = {}
    for name, scheme in ((PATCHED, "qk_norm_cap"), (NORMS, "qk_norm"), (PLAIN, "none")):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
        if name != PLAIN:
            qk.patch_model(model, scheme)
        runs[name] = training_step(model.train(), tokens)
    return by_turns(runs, turns)


def training_step(model: Any, tokens: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
