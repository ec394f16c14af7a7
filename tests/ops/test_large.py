"""128k keys, and more numbers than 32 bits count, against the oracle on slices; small where kernels are interpreted."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
from hf_qknorm.ops.types import Call, Heads, Norm, Options, Rotary, Visible
from qknorm_tests import interpreter
from qknorm_tests.attention_cases import TRITON, Problem
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.norm_cases import knee_at

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
    SCALE = Scale(200, 20, 2, (4, 2), 32, 110, 2, 16)


@pytest.fixture(autouse=True)
def fresh_memory() -> Any:
    """Other processes share the device."""
    yield
    if NATIVE:
        torch.cuda.empty_cache()


def normal(*shape: int, dtype: torch.dtype, seed: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype, device=DEVICE).mul_(spread)


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
    batch, heads, heads_kv = 2, 8 if NATIVE else 2, 2 if NATIVE else 1
    q, grad = (normal(batch, heads, SCALE.queries, SCALE.head_dim, dtype=dtype, seed=n, spread=2.0) for n in (0, 3))
    k, v = (normal(batch, heads_kv, SCALE.keys, SCALE.head_dim, dtype=dtype, seed=n, spread=3.0 - n) for n in (1, 2))
    visible = Visible(padded(batch, SCALE.queries, SCALE.keys) if padding else None)
    Problem(Heads(q, k, v), visible, Options(SCALE.head_dim**-0.5, softcap, not padding), grad).check(TRITON)


CACHE = (SCALE.batch, SCALE.heads[1], SCALE.keys, SCALE.head_dim)
assert not NATIVE or math.prod(CACHE) > 2**31


@pytest.mark.parametrize(("dtype", "softcap"), [(BRAIN, 50.0), (HALF, None), (FULL, None)])
def test_a_step_over_a_large_cache(dtype: torch.dtype, softcap: float | None) -> None:
    q = normal(SCALE.batch, SCALE.heads[0], 1, SCALE.head_dim, dtype=dtype, seed=0, spread=3.0)
    k, v = normal(*CACHE, dtype=dtype, seed=1), normal(*CACHE, dtype=dtype, seed=2)
    ranges, options = padded(SCALE.batch, 1, SCALE.keys - 5), Options(SCALE.head_dim**-0.5, softcap)
    out = TRITON.attend(Call(Heads(q, k, v), Visible(ranges), options))
    for row in (slice(0, 1), slice(-1, None)):
        part = Problem(Heads(q[row], k[row], v[row]), Visible(ranges[row]), options, q[row])
        plain = part.attended({name: x.detach() for name, x in part.leaves.items()}).out
        assert_within_budget(out[row], part.exactly().out, plain)


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
    norms = [Norm("rms", gain, knee=knee_at(knee) if knee else None) for gain in gains]
    frequency = 1e6 ** -torch.linspace(0, 1, SCALE.head_dim // 2, dtype=torch.float64, device=DEVICE)
    angle = (torch.arange(length, dtype=torch.float64, device=DEVICE)[:, None] * frequency)[None]
    cos, sin = angle.cos().float(), angle.sin().float()
    options = Options(SCALE.head_dim**-0.5, 50.0, True, window)

    def of(part: slice) -> Problem:
        """These positions alone."""
        heads = Heads(q[:, :, part], k[:, :, part], v[:, :, part], *norms, Rotary(cos[:, part], sin[:, part]))
        return Problem(heads, Visible(), options, grad[:, :, part])

    got = of(slice(None)).results(TRITON.attend)
    start, end = slice(0, tail), slice(-tail, None)
    for part in (start, end):
        exact, plain = of(part).expected(torch.float64), of(part).expected(BRAIN)
        late = slice(window if part is end else 0, None)  # the first queries of the slice miss keys that are before it
        assert_within_budget(*(x[:, :, late] for x in (got["out"][:, :, part], exact["out"], plain["out"])), "out")
    for name in ("q", "k", "v", "q_gain", "k_gain"):
        x = got[name] if "gain" in name else got[name][:, :, end]
        assert_within_budget(x, exact[name], plain[name], name)
    for name in "qkv":
        assert not got[name][:, :, :-tail].any()
