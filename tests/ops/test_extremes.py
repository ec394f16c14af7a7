"""Attention at the limits: NaN, infinity, empty inputs, caps and sinks of any size."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_qknorm.ops import reference, tiled
from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.types import Call
from qknorm_tests.attention_cases import TILED, Case, Implementation, Problem, assert_exact, problem
from qknorm_tests.covering import covering

F32, F64 = torch.float32, torch.float64
CAPS, NAMES = (None, 5.0, 50.0, 70.0), ("tiled", "cpp", "triton")


def each(*names: str, axes: tuple[Any, ...], fits: Callable[..., bool] = lambda *row: True) -> pytest.MarkDecorator:
    """Every implementation with values of other parameters."""
    rows = covering(NAMES, *axes, fits=fits)
    return pytest.mark.parametrize(("implementation", *names), rows, ids=str, indirect=["implementation"])


def assert_is_the_oracle(given: Problem, implementation: Implementation, *names: str) -> dict[str, Tensor]:
    """Equal to rounding in fp32, NaN where the oracle has NaN; returns the results."""
    expected, got = given.expected(F64), given.results(implementation.attend)
    for name in names or got:
        exact = expected[name].sum_to_size(got[name].shape)
        torch.testing.assert_close(got[name].double(), exact, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)
    return got


@each("spread", "softcap", "bad", axes=([0.1, 3.0], CAPS, [torch.nan, torch.inf]))
def test_a_query_that_is_not_finite_changes_no_other_row(
    implementation: Implementation, spread: float, softcap: float | None, bad: float
) -> None:
    """Its block has small logits, or logits near the cap."""
    given = problem(
        Case(batch=1, queries=40, head_dim=64, causal=True, softcap=softcap, spread=spread), F32, implementation.device
    )
    given.heads.q[:, :, 17, 3] = bad
    got, exact, plain = given.results(implementation.attend), given.expected(F64), given.expected(F32)
    rows = torch.arange(40) != 17
    for name in ("out", "q"):
        assert_exact(got[name][:, :, rows], exact[name][:, :, rows], [plain[name][:, :, rows]], name)
        assert got[name][:, :, 17].isnan().any() == exact[name][:, :, 17].isnan().any()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("measure", [tiled.head_statistics, cpu.head_statistics], ids=["tiled", "cpp"])
@pytest.mark.parametrize("softcap", CAPS)
def test_statistics_report_numbers_that_are_not_finite(measure: Any, softcap: float | None) -> None:
    given = problem(Case(batch=1, heads=3, heads_kv=3, queries=9, causal=True, softcap=softcap), F32)
    q, k, *_ = given.heads
    q[:, 0, 4, 0], q[:, 1], k[:, 1] = torch.nan, 1e20, -1e20  # logits of -inf
    found, exact = measure(*given[:3]), reference.attend(*given[:3]).max_logit
    torch.testing.assert_close(found.max_logit, exact, equal_nan=True)
    assert math.isnan(exact[0])
    assert exact[1] == math.inf
    assert found.entropy[2].isfinite()
    assert found.seen.tolist() == [45] * 3


@each(
    *("dtype", "softcap", "sign", "queries"),
    axes=([F32, torch.bfloat16], CAPS, [1.0, -1.0], [9, 1]),
    fits=lambda name, dtype, softcap, sign, queries: name != "triton" or softcap is not None or sign > 0,
)
def test_logits_that_overflow(
    implementation: Implementation, dtype: torch.dtype, softcap: float | None, sign: float, queries: int
) -> None:
    """A cap bounds them. Without a cap the row is NaN, and not zero as a row without keys."""
    given = problem(Case(batch=1, queries=queries, keys=9, causal=True, softcap=softcap), dtype, implementation.device)
    given.heads.q.fill_(1e30), given.heads.k.fill_(sign * 1e30)
    with torch.no_grad():
        out, exact = implementation.attend(Call(*given[:3])), reference.attend(*given[:3]).out
    torch.testing.assert_close(out, exact, equal_nan=True)
    assert bool(out.isnan().all()) == (softcap is None)


EMPTY = [
    *(Case(queries=0, keys=7), Case(queries=5, keys=0, softcap=5.0), Case(queries=0, keys=0, causal=True, window=3)),
    *(Case(batch=0, queries=5, keys=7, ranges="left_padding"), Case(batch=0, queries=0, keys=0)),
    Case(queries=5, keys=0, sinks=True, softcap=5.0),
]
UNSEEN = Case(queries=5, ranges="nothing", sinks=True, dropout=0.5)
NOTHING = [
    *((name, case) for name in NAMES[:2] for case in EMPTY),
    *((name, UNSEEN) for name in NAMES),
    *(("tiled", Case(queries=5, mask=mask, **sizes)) for mask, sizes in (("bool:BHTS", {"keys": 0}), ("nothing", {}))),
    ("tiled", Case(batch=0, queries=5, keys=7, mask="add:B1TS")),
]


@pytest.mark.parametrize(("implementation", "case"), NOTHING, ids=str, indirect=["implementation"])
def test_queries_without_keys_give_zeros(implementation: Implementation, case: Case) -> None:
    given = problem(case, F32, implementation.device)
    for name, x in given.results(implementation.attend).items():
        assert x.shape == (given.grad if name == "out" else given.leaves[name]).shape
        assert not x.any(), name
    exact = reference.attend(*given[:3])
    assert not any(x.any() for x in (exact.out, exact.max_logit, exact.entropy, *implementation.statistics(given)))


PAIR = {"heads": 2, "heads_kv": 1, "queries": 40}
HIDDEN = [Case(**PAIR, keys=33, causal=True), Case(**PAIR, ranges="left_padding", sinks=True)]


@each("case", axes=(HIDDEN,))
def test_some_queries_without_keys(implementation: Implementation, case: Case) -> None:
    given = problem(case, torch.bfloat16, implementation.device)
    got, empty = given.check(implementation), given.exactly().weights.sum(-1) == 0
    assert 0 < int(empty.sum()) < empty.numel()
    assert not got["out"][empty].any()
    assert not got["q"][empty].any()


@pytest.mark.parametrize("implementation", NAMES[:2], indirect=True)
def test_hidden_logits_that_are_not_finite_change_nothing(implementation: Implementation) -> None:
    """Products that overflow to both sides make NaN of finite numbers."""
    given, found = problem(Case(queries=9, causal=True, softcap=5.0), F32, implementation.device), []
    given.heads.q[..., :2] = 4.0
    given.heads.q[:, :, 8, :2] = 0.0  # the only query that sees the last key
    for largest in (0.0, 3e38):
        given.heads.k[:, :, 8] = torch.tensor([largest, -largest, *[0.0] * 14])
        found.append(given.results(implementation.attend))
        found[-1]["q"] = found[-1]["q"][:, :, :8]
    torch.testing.assert_close(*found)


@each("softcap", "dtype", axes=([1e-30, 1e-3, 1e30], [F32, torch.bfloat16]))
def test_caps_of_any_size(implementation: Implementation, softcap: float, dtype: torch.dtype) -> None:
    """In bf16, a query times a scale that is no power of 2 would be rounded by more than its logit is from 0."""
    case = Case(batch=1, heads=2, heads_kv=1, queries=40, head_dim=64, causal=True, softcap=softcap)
    given = problem(case, dtype, implementation.device)
    exact, plain = given.expected(F64), given.expected(dtype)
    for name, x in given.results(implementation.attend).items():
        assert_exact(x, exact[name], [plain[name]], name)


@each(
    *("case", "sink"),
    axes=(
        [Case(causal=True, window=20), Case(softcap=5.0, ranges="left_padding"), Case(softcap=5.0)],
        [-math.inf, -1e30, 300.0, math.inf, math.nan],
    ),
    fits=lambda name, case, sink: name != "triton" or sink < math.inf,
)
def test_sinks_of_any_size(implementation: Implementation, case: Case, sink: float) -> None:
    given = problem(replace(case, sinks=True, **PAIR), F32, implementation.device)
    sinks = given.visible.sinks
    assert sinks is not None
    sinks[1] = sink
    broken = not sink < math.inf  # then all keys of the head are NaN, visible or not
    got = assert_is_the_oracle(given, implementation, *(("out", "q") if broken else ()))
    ranges = None if given.visible.ranges is None else given.visible.ranges[:, -1:]
    last = Call(given.heads._replace(q=given.heads.q[:, :, -1:]), given.visible._replace(ranges=ranges), given.options)
    with torch.no_grad():  # kernels have a path of their own for a step
        step = implementation.attend(last)
    torch.testing.assert_close(step, got["out"][:, :, -1:], rtol=1e-4, atol=1e-5, equal_nan=True)
    if sink == -math.inf:  # it has no effect
        assert not got["sinks"][1].any()
        without = given._replace(visible=given.visible._replace(sinks=None)).expected(F64)
        for name in ("out", "q"):
            torch.testing.assert_close(got[name][:, 1].double(), without[name][:, 1], rtol=1e-4, atol=1e-5)


def wild_ranges(queries: int, kernel: bool) -> Tensor:
    """Ranges far out of bounds; where there are no kernels that take increasing ones alone, in any order, or empty."""
    least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    if kernel:
        return torch.tensor([(min(i - 9, 3), (5 + i, most)[i > 20]) for i in range(queries)], dtype=torch.int32)[None]
    rows = [(least, 3), (least, most), (-5, 10), (4, 4), (9, 2), (0, most), (25, 29), (29, most)]
    return torch.tensor([rows[i % len(rows)] for i in range(queries)], dtype=torch.int32)[None]


@each("window", "queries", axes=((None, 4), (40, 1)))
def test_ranges_out_of_bounds_end_at_the_last_key(
    implementation: Implementation, window: int | None, queries: int
) -> None:
    """As those of a mask for a longer cache."""
    case = Case(batch=1, heads=2, heads_kv=1, queries=queries, keys=40, window=window, softcap=5.0)
    given = problem(replace(case, causal=window is not None, sinks=window is None), F32, implementation.device)
    ranges = wild_ranges(queries, implementation.name == "triton")
    visible = given.visible._replace(ranges=ranges.to(implementation.device))
    assert_is_the_oracle(given._replace(visible=visible), implementation)


@pytest.mark.parametrize(("sinks", "hidden"), [(False, -math.inf), (True, torch.finfo(F32).min)])
def test_rows_hidden_by_an_additive_mask_are_empty(hidden: float, sinks: bool) -> None:
    given = problem(Case(queries=30, sinks=sinks), F32)
    mask = torch.zeros(2, 1, 30, 30)
    mask[:, :, 3:9], mask[:, :, :, 20:] = hidden, hidden
    given = given._replace(visible=given.visible._replace(mask=mask))
    assert not assert_is_the_oracle(given, TILED)["out"][:, :, 3:9].any()
