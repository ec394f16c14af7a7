"""Fused attention of heads without norm and RoPE against the oracle: every shape and option, output and gradients."""

from __future__ import annotations

import pytest
import torch

from hf_qknorm.ops.triton import attention
from hf_qknorm.ops.triton.architectures import Tile
from hf_qknorm.ops.types import Heads
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.kernel_cases import DEVICE, lay_out, plain_problem, shrink_tiles, use_pointers
from qknorm_tests.tiled_cases import Case

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
ONE = {"batch": 1, "heads": 2, "heads_kv": 1}
PAIR = {"heads": 2, "heads_kv": 1}
GROUPS = {"batch": 1, "heads": 10, "heads_kv": 2}
THREES = {"batch": 1, "heads": 6, "heads_kv": 2}

SHAPES = [
    (Case(), FULL),
    (Case(**ONE, queries=1, keys=63, causal=True, head_dim=64), BRAIN),
    (Case(**ONE, queries=111, causal=True, head_dim=40, softcap=50.0), HALF),
    (Case(batch=1, heads=4, heads_kv=4, head_dim=80, softcap=5.0), BRAIN),
    (Case(batch=1, heads=4, heads_kv=1, head_dim=96, causal=True, softcap=100.0), FULL),
    (Case(batch=1, heads=7, heads_kv=1, head_dim=112, causal=True), HALF),
    (Case(**GROUPS, queries=33, head_dim=16, softcap=5.0), HALF),
    (Case(**ONE, causal=True, head_dim=256, softcap=5.0), FULL),
    (Case(**ONE, queries=40, head_dim=256), BRAIN),
    (Case(**ONE, queries=5, keys=111, causal=True, head_dim=128), HALF),
    (Case(**ONE, queries=111, keys=63, causal=True, softcap=50.0, head_dim=80), BRAIN),
    (Case(**ONE, queries=64, keys=2, head_dim=16, softcap=100.0), FULL),
]
WINDOWS = [
    (Case(**ONE, queries=111, causal=True, window=2, softcap=5.0), BRAIN),
    (Case(**ONE, queries=63, window=9, head_dim=96), BRAIN),
    (Case(**ONE, queries=64, window=1, softcap=100.0), HALF),
    (Case(**ONE, causal=True, window=500, head_dim=40), FULL),
    (Case(**ONE, queries=80, keys=40, window=20), HALF),
    (Case(**ONE, queries=40, keys=80, causal=True, window=20, softcap=50.0), HALF),
    (Case(**ONE, queries=40, window=2**31 - 1), FULL),
    (Case(**ONE, queries=63, keys=40, causal=True, window=2**31 - 1, softcap=50.0), BRAIN),
]
RANGES = [
    (Case(**PAIR, ranges="left_padding", softcap=50.0), BRAIN),
    (Case(**PAIR, ranges="right_padding", causal=True), HALF),
    (Case(**PAIR, ranges="packed", queries=40, keys=63, causal=True, window=7), BRAIN),
    (Case(**PAIR, ranges="window", queries=40, window=9), HALF),
    (Case(**PAIR, ranges="right_padding", queries=40, keys=63, softcap=5.0), FULL),
    (Case(**PAIR, ranges="packed", queries=63, softcap=100.0), HALF),
    (Case(**PAIR, ranges="window", queries=80, keys=63), BRAIN),
    (Case(**PAIR, ranges="shared", queries=40, softcap=5.0), HALF),
]
SINKS = [
    (Case(**THREES, sinks=True, queries=40, causal=True, window=20), BRAIN),
    (Case(**THREES, sinks=True, queries=40, softcap=50.0), HALF),
    (Case(**THREES, sinks=True, queries=40, keys=33, causal=True, softcap=5.0), FULL),
    (Case(**THREES, sinks=True, queries=40, ranges="packed"), FULL),
    (Case(**THREES, sinks=True, queries=40, ranges="left_padding", softcap=100.0), BRAIN),
]


PADDED = [
    (Case(**THREES, queries=33, keys=40, causal=True, head_dim=80, softcap=5.0), HALF),
    (Case(**PAIR, queries=40, ranges="packed", head_dim=96), BRAIN),
    (Case(**THREES, queries=40, causal=True, window=20, head_dim=96, sinks=True), FULL),
    (Case(**ONE, queries=40, keys=33, head_dim=192, softcap=50.0), BRAIN),
    (Case(**ONE, queries=33, causal=True, head_dim=152), HALF),
]
# By pointers, as GPUs without a copy engine, and by descriptors
CASES = [
    *((*each, bool(i % 2)) for i, each in enumerate([*SHAPES, *WINDOWS, *RANGES, *SINKS])),
    *((*each, pointers) for each in PADDED for pointers in (False, True)),
]


@pytest.mark.parametrize(("case", "dtype", "pointers"), CASES, ids=str)
def test_output_and_gradients(case: Case, dtype: torch.dtype, pointers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_tiles(monkeypatch)
    if pointers:
        use_pointers(monkeypatch)
    plain_problem(case, dtype).check()


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(**GROUPS, queries=3, keys=300, causal=True, softcap=50.0, sinks=True), BRAIN),
        (Case(heads=10, queries=2, keys=260, causal=True, window=250, ranges="left_padding"), HALF),
    ],
    ids=str,
)
def test_gradients_after_a_split_forward_pass(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few queries over many keys have a forward pass of their own, and the common backward pass."""
    monkeypatch.setattr(attention.attention_decode, "splits", lambda q, k: 2)
    monkeypatch.setattr(attention, "forward_kernel", None)  # fails if it runs
    plain_problem(case, dtype).check()


@pytest.mark.parametrize("forward", [Tile(16, 16, 4, 1), Tile(64, 16, 4, 1), Tile(16, 64, 4, 1, apart=True)], ids=str)
def test_tiles_of_every_shape(forward: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_tiles(monkeypatch, forward=forward, query_gradient=forward, key_gradient=forward)
    plain_problem(Case(batch=3, heads=1, heads_kv=1, queries=70, keys=60, ranges="window"), FULL).check()
    plain_problem(Case(**ONE, queries=90, causal=True, window=37, softcap=5.0), FULL).check()


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(Case(queries=1), FULL), (Case(queries=1), BRAIN), (Case(queries=9, causal=True, window=1, softcap=5.0), HALF)],
    ids=str,
)
def test_a_single_key(case: Case, dtype: torch.dtype) -> None:
    """The weight is 1: the gradients of q and k are 0 and have no relative error."""
    problem = plain_problem(case, dtype)
    exact, eager, got = problem.expected(torch.float64), problem.expected(dtype), problem.results()
    for what in ("out", "v"):
        assert_within_budget(got[what], exact[what], eager[what], what)
    for what in ("q", "k"):
        assert float(got[what].abs().max()) <= 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "case",
    [
        Case(**PAIR, queries=40, ranges="nothing", softcap=50.0, sinks=True),
        Case(**PAIR, keys=33, causal=True),
        Case(**PAIR, queries=40, ranges="left_padding"),
        Case(**PAIR, queries=40, ranges="left_padding", sinks=True),
    ],
    ids=str,
)
def test_queries_without_keys(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_tiles(monkeypatch)
    problem = plain_problem(case, BRAIN)
    result = attention.forward(problem.heads, problem.visible, problem.options)
    leaves = {x: y.detach() for x, y in problem.leaves.items()}
    empty = problem.attended(leaves).weights.sum(-1) == 0
    assert empty.any()
    assert not result.out[empty].any()
    if not case.sinks:
        assert torch.equal(result.normaliser[..., 1] == 0, empty)
    got = attention.backward(
        problem.grad, problem.heads, problem.visible, problem.options, result.out, result.normaliser
    )
    assert not got.q[empty].any()
    if empty.all():
        assert not any(x.any() for x in got if x is not None)


@pytest.mark.parametrize("layout", ["projection", "tokens", "gaps", "sparse"])
def test_strides_change_no_bit(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and gradients have a projection's layout, share one buffer, or have odd strides."""
    shrink_tiles(monkeypatch)
    problem = plain_problem(Case(queries=20, causal=True, softcap=50.0), BRAIN)
    q, k, v = problem.heads[:3]
    if layout == "projection":
        fused = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1)
        parts = fused.split([x.shape[1] * x.shape[3] for x in (q, k, v)], -1)
        heads = [x.unflatten(-1, (-1, q.shape[3])).transpose(1, 2) for x in parts]
        grad = problem.grad.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        *heads, grad = (lay_out(x, layout) for x in (q, k, v, problem.grad))
    laid_out = problem._replace(heads=Heads(*heads), grad=grad)
    torch.testing.assert_close(laid_out.results(), problem.results(), rtol=0, atol=0)


def test_the_gradient_of_a_sum() -> None:
    """It is one expanded number, with strides of zero."""
    problem = plain_problem(Case(queries=9, causal=True), FULL)
    one = torch.ones(1, device=DEVICE)
    expanded = problem._replace(grad=one.expand(problem.grad.shape)).results()
    plainly = problem._replace(grad=one.expand(problem.grad.shape).contiguous()).results()
    torch.testing.assert_close(expanded, plainly, rtol=0, atol=0)
