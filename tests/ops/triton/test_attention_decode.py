"""Attention of a few queries over many keys against the oracle; its normaliser is tested by gradients."""

from __future__ import annotations

import math

import pytest
import torch

from hf_qknorm.ops import reference
from hf_qknorm.ops.triton import attention, attention_decode
from hf_qknorm.ops.types import Heads
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.kernel_cases import DEVICE, Problem, lay_out, plain_problem
from qknorm_tests.tiled_cases import Case

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
STEP = {"batch": 3, "heads": 8, "queries": 1, "keys": 600}
CHUNK = {"heads": 8, "queries": 3, "keys": 300}

# The case, its dtype, the splits of the keys if they are fixed, and how many keys of a cache are filled
CASES: list[tuple[Case, torch.dtype, int | None, int | None]] = [
    (Case(**STEP, causal=True, softcap=50.0), FULL, None, None),
    (Case(**STEP | {"heads": 2, "batch": 12}, causal=True, head_dim=80), BRAIN, None, None),
    (Case(**STEP | {"heads": 7, "heads_kv": 1, "batch": 4}, softcap=100.0, head_dim=128), BRAIN, None, None),
    (Case(**STEP | {"keys": 3, "batch": 12}, causal=True, spread=20.0), FULL, None, None),
    (Case(**STEP | {"keys": 1}, causal=True, softcap=50.0), BRAIN, None, None),
    (Case(**STEP, causal=True, window=1), HALF, 3, None),
    (Case(**STEP, softcap=50.0, sinks=True), HALF, 9, 300),
    (Case(**CHUNK, causal=True, softcap=50.0, head_dim=96), HALF, None, None),
    (Case(**CHUNK | {"keys": 255, "heads": 2}, causal=True, softcap=50.0, head_dim=128), FULL, None, None),
    (Case(**CHUNK | {"keys": 257, "heads": 7, "heads_kv": 1}, causal=True, head_dim=128), BRAIN, 2, None),
    (Case(**CHUNK, causal=True, head_dim=96, spread=6.0), FULL, 17, None),
    (Case(**CHUNK, causal=True, window=103, sinks=True, softcap=50.0), BRAIN, 4, None),
    (Case(**CHUNK, window=2**31 - 1, softcap=50.0), FULL, 2, None),
    (Case(**CHUNK | {"keys": 257}, sinks=True, softcap=100.0), FULL, 2, None),
    (Case(**CHUNK, softcap=50.0, head_dim=96), BRAIN, None, 200),
    (Case(**CHUNK | {"keys": 500}, head_dim=80), FULL, 2, 450),
    (Case(**CHUNK | {"keys": 257, "queries": 2}), BRAIN, 2, 2),
    (Case(**CHUNK | {"keys": 130}, causal=True, softcap=50.0, sinks=True, head_dim=256), BRAIN, 2, None),
    (Case(batch=1, heads=7, heads_kv=1, queries=23, keys=150, causal=True, sinks=True), FULL, 3, None),  # three blocks
    (Case(batch=1, queries=40, keys=130, causal=True, window=20, softcap=50.0), BRAIN, 2, None),
    (Case(batch=1, heads=2, heads_kv=1, queries=35, keys=256), HALF, 3, 100),
]


def fill(problem: Problem, filled: int) -> Problem:
    """As in a static cache with left padding: causal ranges over so many keys, and large numbers behind them."""
    (batch, _, queries, _), (_, k, v, *_) = problem.heads.q.shape, problem.heads
    for x in (k, v):
        x[:, :, filled:] = 3e4 * torch.randn_like(x[:, :, filled:]).sign()
    stop = torch.arange(filled - queries, filled) + 1
    start = torch.minimum(2 * torch.arange(batch)[:, None], stop)
    ranges = torch.stack([start, stop.expand(batch, -1)], -1).to(DEVICE, torch.int32)
    return problem._replace(visible=problem.visible._replace(ranges=ranges))


def force(monkeypatch: pytest.MonkeyPatch, splits: int | None) -> None:
    """Let no other kernel run, and fix the number of splits."""
    monkeypatch.setattr(attention, "forward_kernel", None)
    if splits is not None:
        monkeypatch.setattr(attention_decode, "splits", lambda q, k: splits)


def run(problem: Problem) -> attention.Result:
    return attention.forward(problem.heads, problem.visible, problem.options)


def attended(problem: Problem, dtype: torch.dtype) -> reference.Attended:
    """The oracle in this dtype."""
    return problem.attended({name: x.detach().to(dtype) for name, x in problem.leaves.items()})


@pytest.mark.parametrize(("case", "dtype", "splits", "filled"), CASES, ids=str)
def test_the_output(
    case: Case, dtype: torch.dtype, splits: int | None, filled: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, splits)
    problem = plain_problem(case, dtype)
    problem = problem if filled is None else fill(problem, filled)
    out, (exact, eager) = run(problem).out, (attended(problem, x) for x in (torch.float64, dtype))
    assert out.transpose(1, 2).is_contiguous()
    assert out.dtype == dtype
    assert not out[exact.weights.sum(-1) == 0].any()
    assert_within_budget(out, exact.out, eager.out)


@pytest.mark.parametrize(("sink", "softcap"), [(-math.inf, 50.0), (-90.0, None), (40.0, 50.0), (300.0, None)])
def test_sinks_of_any_size(sink: float, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums without a maximum are combined with sinks that overflow without one."""
    force(monkeypatch, None)
    problem = plain_problem(Case(heads=2, heads_kv=1, queries=2, keys=512, causal=True, softcap=softcap), FULL)
    sinks = torch.tensor([sink, 0.0], device=DEVICE)
    problem = problem._replace(visible=problem.visible._replace(sinks=sinks))
    found, exact, eager = run(problem), attended(problem, torch.float64), attended(problem, FULL)
    for head in range(2):
        assert_within_budget(found.out[:, head], exact.out[:, head], eager.out[:, head])
    missing = (1 - exact.weights.sum(-1))[:, 0]  # the share of the sink
    peak, total = found.normaliser[:, 0].double().unbind(-1)
    share = (sink - (peak + total.log2()) * math.log(2)).exp()
    torch.testing.assert_close(share, missing, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("queries", "keys"), [("tokens", "gaps"), ("sparse", "gaps"), ("gaps", "sparse")])
def test_any_strides(queries: str, keys: str) -> None:
    problem = plain_problem(Case(**CHUNK, causal=True, softcap=50.0), BRAIN)
    layouts = zip(problem.heads[:3], (queries, keys, keys), strict=True)
    view = problem._replace(heads=Heads(*(lay_out(x, layout) for x, layout in layouts)))
    assert torch.equal(run(view).out, run(problem).out)


def test_nan_reaches_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 3)
    problem = plain_problem(Case(**STEP, causal=True, softcap=50.0), FULL)
    problem.heads.q[0, 0] = torch.nan
    out = run(problem).out
    assert out[0, 0].isnan().all()
    assert out[:, 1:].isfinite().all()
