"""Attention at the limits: NaN, infinity, empty inputs, caps and sinks of any size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hf_qknorm.ops import library, reference, tiled
from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.types import Call, Heads, Options, Visible
from qknorm_tests.covering import covering
from qknorm_tests.cpu_cases import cpu_results
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.operator_calls import call
from qknorm_tests.random_qkv import make_qkv
from qknorm_tests.tiled_cases import Case, Inputs, draw_inputs, oracle_results, tiled_results

CAPS = (None, 5.0, 50.0, 70.0)
NAMES = ("out", "dq", "dk", "dv", "dsinks")


class Implementation(NamedTuple):
    """The results of a case, the operator, the statistics of its logits, and a dtype with its rounding errors."""

    results: Any
    attend: Any
    head_statistics: Any
    dtype: torch.dtype
    tolerance: dict[str, float]


IMPLEMENTATIONS = {
    "tiled": Implementation(
        tiled_results, library.attention, tiled.head_statistics, torch.float64, {"rtol": 1e-10, "atol": 1e-11}
    ),
    "cpp": Implementation(
        cpu_results,
        lambda *call: cpu.attention(Call(*call)),
        cpu.head_statistics,
        torch.float32,
        {"rtol": 1e-4, "atol": 1e-5},
    ),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "cpp":
        request.getfixturevalue("compiled")
    return IMPLEMENTATIONS[request.param]


def assert_is_the_oracle(
    implementation: Implementation, case: Case, inputs: Inputs, names: tuple[str, ...] = NAMES
) -> dict[str, Tensor]:
    """Equal to rounding, NaN where the oracle has NaN; returns the results."""
    expected, got = oracle_results(case, inputs.to(torch.float64)), implementation.results(case, inputs)
    for name in names:
        if name in got:
            torch.testing.assert_close(
                got[name].double(), expected[name], **implementation.tolerance, equal_nan=True,
                msg=lambda m, n=name: f"{n}: {m}",
            )  # fmt: skip
    return got


@pytest.mark.parametrize(("spread", "softcap", "bad"), covering([0.1, 3.0], CAPS, [torch.nan, torch.inf]))
def test_a_query_that_is_not_finite_changes_no_other_row(
    implementation: Implementation, spread: float, softcap: float | None, bad: float
) -> None:
    """Its block has small logits, or logits near the cap."""
    case = Case(queries=40, head_dim=64, causal=True, softcap=softcap, spread=spread)
    inputs = draw_inputs(case, torch.float32)
    with torch.no_grad():
        inputs.q[:, :, 17, 3] = bad
    exact, eager = oracle_results(case, inputs.to(torch.float64)), oracle_results(case, inputs)
    got = implementation.results(case, inputs)
    rows = torch.arange(40) != 17
    for name in ("out", "dq"):
        assert_within_budget(*(x[name][:, :, rows] for x in (got, exact, eager)), name)
        assert got[name][:, :, 17].isnan().any() == exact[name][:, :, 17].isnan().any()


@pytest.mark.parametrize("softcap", CAPS)
def test_statistics_report_numbers_that_are_not_finite(implementation: Implementation, softcap: float | None) -> None:
    q, k, v = (x.detach() for x in make_qkv(1, 3, 3, 9, 9, 16))
    q[:, 0, 4, 0], q[:, 1] = torch.nan, 1e20
    k[:, 1] = -1e20  # logits of -inf
    given = Heads(q, k, v), Visible(), Options(1.0, softcap, causal=True)
    found, exact = implementation.head_statistics(*given), reference.attend(*given).max_logit
    torch.testing.assert_close(found.max_logit, exact, equal_nan=True)
    assert math.isnan(exact[0])
    assert exact[1] == math.inf
    assert found.entropy[2].isfinite()
    assert found.seen.tolist() == [45] * 3


@pytest.mark.parametrize(
    ("dtype", "softcap", "sign", "queries"),
    covering([torch.float32, torch.bfloat16], CAPS, [1.0, -1.0], [9, 1]),
    ids=str,
)
def test_logits_that_overflow(
    implementation: Implementation, dtype: torch.dtype, softcap: float | None, sign: float, queries: int
) -> None:
    """A cap bounds them. Without a cap the row is NaN, and not zero as a row without keys."""
    q, k, v = (x.detach() for x in make_qkv(1, 2, 1, queries, 9, 16, dtype=dtype))
    q, k = torch.full_like(q, 1e30), torch.full_like(k, sign * 1e30)
    given = call(q, k, v, softcap=softcap, causal=True)
    out, exact = implementation.attend(*given), reference.attend(*given).out
    torch.testing.assert_close(out, exact, equal_nan=True)
    assert bool(out.isnan().all()) == (softcap is None)


NOTHING = [
    Case(queries=0, keys=7),
    Case(queries=5, keys=0, softcap=5.0),
    Case(queries=0, keys=0, causal=True, window=3),
    Case(batch=0, queries=5, keys=7, ranges="left_padding"),
    Case(batch=0, queries=0, keys=0),
    Case(queries=5, keys=0, sinks=True, softcap=5.0),
    Case(queries=5, ranges="nothing", sinks=True, dropout=0.5),
]
MASKED = [Case(queries=5, keys=0, mask="bool:BHTS"), Case(batch=0, queries=5, keys=7, mask="add:B1TS")]


def assert_is_nothing(implementation: Implementation, case: Case) -> None:
    inputs = draw_inputs(case, torch.float32)
    for name, result in implementation.results(case, inputs).items():
        assert result.shape == getattr(inputs, {"out": "q", "dsinks": "sinks"}.get(name, name[1:])).shape
        assert not result.any(), name
    given = inputs.heads, inputs.visible, case.options
    exact = reference.attend(*given)
    with torch.no_grad():
        found = implementation.head_statistics(*given)
    assert not any(x.any() for x in (exact.out, exact.max_logit, exact.entropy, *found))


@pytest.mark.parametrize("case", NOTHING, ids=str)
def test_queries_without_keys_give_zeros(implementation: Implementation, case: Case) -> None:
    assert_is_nothing(implementation, case)


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_masks_of_nothing_give_zeros(case: Case) -> None:
    assert_is_nothing(IMPLEMENTATIONS["tiled"], case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [1e-30, 1e-3, 1e30])
def test_caps_of_any_size(implementation: Implementation, softcap: float, dtype: torch.dtype) -> None:
    """In bf16, a query times a scale that is no power of 2 would be rounded by more than its logit is from 0."""
    case = Case(queries=40, head_dim=64, causal=True, softcap=softcap)
    inputs = draw_inputs(case, dtype)
    exact, eager = oracle_results(case, inputs.to(torch.float64)), oracle_results(case, inputs)
    for name, result in implementation.results(case, inputs).items():
        if float(exact[name].norm()) > 0:
            assert_within_budget(result, exact[name], eager[name], name)
        else:
            assert not result.any()


@pytest.mark.parametrize(
    ("case", "sink"),
    covering(
        [Case(causal=True), Case(softcap=5.0, ranges="left_padding"), Case(softcap=5.0)],
        [-math.inf, -1e30, 300.0, math.inf, math.nan],
    ),
    ids=str,
)
def test_sinks_of_any_size(implementation: Implementation, case: Case, sink: float) -> None:
    case = replace(case, sinks=True, queries=30)
    inputs = draw_inputs(case, implementation.dtype)
    with torch.no_grad():
        inputs.sinks[1] = sink
    broken = not sink < math.inf  # then all keys of the head are NaN, visible or not
    got = assert_is_the_oracle(implementation, case, inputs, ("out", "dq", "dsinks") if broken else NAMES)
    last = inputs.visible._replace(ranges=None if inputs.ranges is None else inputs.ranges[:, -1:])
    with torch.no_grad():  # kernels have a path of their own for a step
        step = implementation.attend(inputs.heads._replace(q=inputs.q[:, :, -1:]), last, case.options)
    torch.testing.assert_close(step, got["out"][:, :, -1:], **implementation.tolerance, equal_nan=True)
    if sink == -math.inf:  # it has no effect
        without = oracle_results(case, replace(inputs, sinks=None).to(torch.float64))
        for name in ("out", "dq"):
            torch.testing.assert_close(got[name][:, 1].double(), without[name][:, 1], **implementation.tolerance)


def wild_ranges(queries: int) -> Tensor:
    """Ranges far out of bounds, empty, or with the stop before the start."""
    least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    rows = [(least, 3), (least, most), (-5, 10), (4, 4), (9, 2), (0, most), (25, 29), (29, most)]
    return torch.tensor([rows[i % len(rows)] for i in range(queries)], dtype=torch.int32)[None]


@pytest.mark.parametrize(("window", "sinks"), [(None, True), (4, False)])
def test_ranges_out_of_bounds_end_at_the_last_key(
    implementation: Implementation, sinks: bool, window: int | None
) -> None:
    case = Case(batch=1, queries=100, causal=window is not None, window=window, sinks=sinks, softcap=5.0)
    inputs = replace(draw_inputs(case, implementation.dtype), ranges=wild_ranges(100))
    assert_is_the_oracle(implementation, case, inputs)


@pytest.mark.parametrize(("sinks", "hidden"), [(False, -math.inf), (True, torch.finfo(torch.float64).min)])
def test_rows_hidden_by_an_additive_mask_are_empty(hidden: float, sinks: bool) -> None:
    case = Case(queries=30, sinks=sinks)
    mask = torch.zeros(2, 1, 30, 30, dtype=torch.float64)
    mask[:, :, 3:9], mask[:, :, :, 20:] = hidden, hidden
    inputs = replace(draw_inputs(case, torch.float64), mask=mask)
    assert not assert_is_the_oracle(IMPLEMENTATIONS["tiled"], case, inputs)["out"][:, :, 3:9].any()
