"""128k keys, and more numbers than 32 bits count, against the oracle on slices; small where kernels are interpreted."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
from hf_qknorm.ops import library, reference
from hf_qknorm.ops.types import Norm, Rotary
from qknorm_tests import interpreter
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.norm_cases import knee_at
from qknorm_tests.operator_calls import call

interpreter.install()
NATIVE = torch.cuda.is_available()
DEVICE = torch.device("cuda" if NATIVE else "cpu")
FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


class Scale(NamedTuple):
    """How large the problems are."""

    keys: int
    queries: int
    batch: int  # of a cache
    heads: tuple[int, int]  # of queries and keys in a test with many keys
    head_dim: int
    length: int  # of the long text, with so many heads and a window
    heads_long: int
    window: int


SCALE = Scale(131_072, 100, 17, (32, 8), 128, 2**18 + 200, 64, 256)
if not NATIVE:
    SCALE = Scale(300, 34, 2, (4, 2), 32, 150, 4, 16)


@pytest.fixture(autouse=True)
def fresh_memory() -> Any:
    """Other processes share the device."""
    yield
    if NATIVE:
        torch.cuda.empty_cache()


def normal(*shape: int, dtype: torch.dtype, seed: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype, device=DEVICE).mul_(spread)


def with_gradients(leaves: list[Tensor], grad: Tensor, attend: Any) -> list[Tensor]:
    """The result of `attend`, and the gradients of the leaves."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def by_head(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, ranges: Tensor | None, dtype: torch.dtype, **options: Any
) -> list[Tensor]:
    """Output and gradients of the oracle in `dtype`, a group of heads at a time: all logits would not fit."""
    (batch, heads_kv), group, parts = k.shape[:2], q.shape[1] // k.shape[1], []
    for b in range(batch):
        for first in range(heads_kv):
            own, lead = slice(first, first + 1), slice(group * first, group * (first + 1))
            leaves = [x[b : b + 1, part].to(dtype) for x, part in ((q, lead), (k, own), (v, own))]
            seen = None if ranges is None else ranges[b : b + 1]
            attend = lambda *x, seen=seen: reference.attention(*x, ranges=seen, **options).out  # noqa: E731
            parts.append(with_gradients(leaves, grad[b : b + 1, lead].to(dtype), attend))
    return [torch.cat(x, 1).unflatten(1, (batch, -1))[0] for x in zip(*parts, strict=True)]


def check(got: list[Tensor], exact: list[Tensor], eager: list[Tensor]) -> None:
    for name, x, wanted, plain in zip(("out", "dq", "dk", "dv", "dq_gain", "dk_gain"), got, exact, eager, strict=False):
        assert_within_budget(x, wanted, plain, name)


def padded(batch: int, queries: int, filled: int) -> Tensor:
    """Causal ranges over a cache that is filled so far, after padding on the left that grows from row to row."""
    stop = torch.arange(filled - queries, filled, device=DEVICE) + 1
    start = torch.arange(batch, device=DEVICE)[:, None] * (filled // (2 * batch)) + 3
    return torch.stack([start.expand(-1, queries), stop.expand(batch, -1)], -1).int()


@pytest.mark.parametrize(
    ("dtype", "softcap", "padding"),
    [(BRAIN, 50.0, True), (HALF, 50.0, False), (HALF, None, True), (FULL, 50.0, True)][: 4 if NATIVE else 1],
)
def test_a_few_queries_over_many_keys(dtype: torch.dtype, softcap: float | None, padding: bool) -> None:
    heads, heads_kv = 8 if NATIVE else 2, 2 if NATIVE else 1
    batch, keys, queries = 2, SCALE.keys, SCALE.queries
    q = normal(batch, heads, queries, SCALE.head_dim, dtype=dtype, seed=0, spread=2.0)
    k = normal(batch, heads_kv, keys, SCALE.head_dim, dtype=dtype, seed=1, spread=2.0)
    v = normal(batch, heads_kv, keys, SCALE.head_dim, dtype=dtype, seed=2)
    grad = normal(*q.shape, dtype=dtype, seed=3)
    ranges = padded(batch, queries, keys) if padding else None
    options = {"softcap": softcap, "causal": not padding}
    got = with_gradients([q, k, v], grad, lambda *x: library.fused_attention(*call(*x, ranges=ranges, **options)))
    exact, eager = (by_head(q, k, v, grad, ranges, x, **options) for x in (torch.float64, dtype))
    check(got, exact, eager)


CACHE = (SCALE.batch, SCALE.heads[1], SCALE.keys, SCALE.head_dim)
assert not NATIVE or math.prod(CACHE) > 2**31


@pytest.mark.parametrize(("dtype", "softcap"), [(BRAIN, 50.0), (HALF, None), (FULL, None)])
def test_a_step_over_a_large_cache(dtype: torch.dtype, softcap: float | None) -> None:
    q = normal(SCALE.batch, SCALE.heads[0], 1, SCALE.head_dim, dtype=dtype, seed=0, spread=3.0)
    k, v = normal(*CACHE, dtype=dtype, seed=1), normal(*CACHE, dtype=dtype, seed=2)
    ranges = padded(SCALE.batch, 1, SCALE.keys - 5)
    out = library.fused_attention(*call(q, k, v, ranges=ranges, softcap=softcap))
    for row in (slice(0, 1), slice(-1, None)):
        part = (q[row], k[row], v[row], torch.zeros_like(q[row]), ranges[row])
        exact, eager = (by_head(*part, x, softcap=softcap)[:1] for x in (torch.float64, dtype))
        check([out[row]], exact, eager)


def rotation(length: int, part: slice) -> Rotary:
    """The angles of these positions of a text, `[1, n, D/2]`."""
    frequency = 1e6 ** -torch.linspace(0, 1, SCALE.head_dim // 2, dtype=torch.float64, device=DEVICE)
    angle = torch.arange(length, dtype=torch.float64, device=DEVICE)[part, None] * frequency
    return Rotary(angle.cos().float()[None], angle.sin().float()[None])


def prepared(x: Tensor, gain: Tensor, shape: Tensor | None, rotary: Rotary) -> Tensor:
    """The oracle's norm and a plain rotation of x `[B, H, T, D]`, in its own precision."""
    x = reference.head_norm(x, "rms", gain, knee=shape)
    cos, sin = (part.to(x.dtype)[:, None] for part in rotary[:2])
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def on_slice(
    leaves: list[Tensor], grad: Tensor, part: slice, dtype: torch.dtype, shape: Tensor | None, **options: Any
) -> list[Tensor]:
    """Output and gradients of the oracle in `dtype`, for these positions alone."""
    rotary = rotation(SCALE.length, part)

    def attend(q: Tensor, k: Tensor, v: Tensor, q_gain: Tensor, k_gain: Tensor) -> Tensor:
        q, k = prepared(q, q_gain, shape, rotary), prepared(k, k_gain, shape, rotary)
        return reference.attention(q, k, v, **options).out

    heads = [x[:, :, part].to(dtype) for x in leaves[:3]]
    return with_gradients([*heads, *(x.to(dtype) for x in leaves[3:])], grad[:, :, part].to(dtype), attend)


@pytest.mark.parametrize(("heads_kv", "knee"), [(1, 0.0), (SCALE.heads_long, 4.0)])
def test_tensors_that_32_bits_do_not_index(heads_kv: int, knee: float) -> None:
    """Only the last outputs have a gradient, so a slice of the text determines it; elsewhere it is zero."""
    window, tail, length = SCALE.window, 3 * SCALE.window, SCALE.length
    q, k, v, grad = (
        normal(1, length, heads, SCALE.head_dim, dtype=BRAIN, seed=seed).transpose(1, 2)
        for seed, heads in enumerate((SCALE.heads_long, heads_kv, heads_kv, SCALE.heads_long))
    )
    assert not NATIVE or q.numel() > 2**31
    grad[:, :, : window - tail] = 0.0
    gains = [1.5 + normal(SCALE.head_dim, dtype=BRAIN, seed=seed, spread=0.3) for seed in (4, 5)]
    options = {"softcap": 50.0, "causal": True, "window": window}
    whole, shape = rotation(length, slice(None)), knee_at(knee) if knee else None

    def attend(q: Tensor, k: Tensor, v: Tensor, q_gain: Tensor, k_gain: Tensor) -> Tensor:
        norms = {"q_norm": Norm("rms", q_gain, knee=shape), "k_norm": Norm("rms", k_gain, knee=shape)}
        return library.fused_attention(*call(q, k, v, **norms, rotary=whole, **options))

    leaves = [q, k, v, *gains]
    out, *grads = with_gradients(leaves, grad, attend)
    start, end = slice(0, tail), slice(-tail, None)
    exact, eager = (on_slice(leaves, grad, start, x, shape, **options)[:1] for x in (torch.float64, BRAIN))
    check([out[:, :, start]], exact, eager)
    exact, eager = (on_slice(leaves, grad, end, x, shape, **options) for x in (torch.float64, BRAIN))
    for results in (exact, eager):  # the first queries of the slice miss keys that are before it
        results[0] = results[0][:, :, window:]
    check([out[:, :, window - tail :], *(x[:, :, end] for x in grads[:3]), *grads[3:]], exact, eager)
    for x in grads[:3]:
        assert not x[:, :, :-tail].any()
