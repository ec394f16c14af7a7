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
    """The results of a case, the operator, and the statistics of its logits."""

    results: Any
    attend: Any
    head_statistics: Any


IMPLEMENTATIONS = {
    "tiled": Implementation(tiled_results, library.attention, tiled.head_statistics),
    "cpp": Implementation(cpu_results, lambda *call: cpu.attention(Call(*call)), cpu.head_statistics),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "cpp":
        request.getfixturevalue("compiled")
    return IMPLEMENTATIONS[request.param]


def assert_is_the_oracle(case: Case, inputs: Inputs, names: tuple[str, ...] = NAMES) -> None:
    """Equal to rounding in fp64, NaN where it has NaN."""
    expected = oracle_results(case, inputs)
    for name, result in tiled_results(case, inputs).items():
        if name in names:
            torch.testing.assert_close(
                result, expected[name], rtol=1e-10, atol=1e-11, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


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
    Case(queries=5, keys=0),
    Case(queries=0, keys=0),
    Case(batch=0, queries=5, keys=7),
    Case(batch=0, queries=0, keys=0),
]
RULES = [
    {},
    {"softcap": 5.0},
    {"causal": True, "window": 3},
    {"sinks": True, "softcap": 5.0},
    {"mask": "bool:BHTS"},
    {"mask": "add:B1TS"},
    {"ranges": "left_padding"},
]


@pytest.mark.parametrize(("case", "rules"), covering(NOTHING, RULES, strength=1), ids=str)
def test_empty_inputs_give_zeros(case: Case, rules: dict) -> None:
    case = replace(case, **rules)
    inputs = draw_inputs(case, torch.float64)
    given = inputs.heads, inputs.visible, case.options
    leaves = [x for x in (inputs.q, inputs.k, inputs.v, inputs.sinks) if x is not None]
    exact = reference.attend(*given)
    for out in (exact.out, library.attention(*given)):
        assert out.shape == inputs.q.shape
        assert not out.any()
        for leaf, grad in zip(leaves, torch.autograd.grad(out, leaves, torch.ones_like(out)), strict=True):
            assert grad.shape == leaf.shape
            assert not grad.any()
    assert not exact.max_logit.any()
    assert not exact.entropy.any()
    with torch.no_grad():
        found = tiled.head_statistics(*given)
    assert not any(x.any() for x in found)


@pytest.mark.parametrize("softcap", [1e-30, 1e-3, 1e30])
def test_caps_of_any_size(softcap: float) -> None:
    case = Case(queries=40, head_dim=64, causal=True, softcap=softcap)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = draw_inputs(case, dtype)
        exact, eager = oracle_results(case, inputs.to(torch.float64)), oracle_results(case, inputs)
        for name, result in tiled_results(case, inputs).items():
            if float(exact[name].norm()) > 0:
                assert_within_budget(result, exact[name], eager[name], name)
            else:
                assert not result.any()


@pytest.mark.parametrize("sink", [-math.inf, -1e30, -300.0, 300.0, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("case", [Case(causal=True), Case(softcap=5.0, mask="left_padding")], ids=str)
def test_sinks_of_any_size(case: Case, sink: float) -> None:
    inputs = draw_inputs(replace(case, sinks=True, queries=30), torch.float64)
    with torch.no_grad():
        inputs.sinks[1] = sink
    case = replace(case, queries=30)
    broken = not sink < math.inf  # then all keys of the head are NaN, visible or not
    assert_is_the_oracle(case, inputs, ("out", "dq", "dsinks") if broken else NAMES)
    if sink == -math.inf:  # it has no effect
        without = oracle_results(case, replace(inputs, sinks=None))
        for name, result in tiled_results(case, inputs).items():
            if name in ("out", "dq"):
                torch.testing.assert_close(result[:, 1], without[name][:, 1], rtol=1e-10, atol=1e-11)


def wild_ranges(queries: int) -> Tensor:
    """Ranges far out of bounds, empty, or with the stop before the start."""
    least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    rows = [(least, 3), (least, most), (-5, 10), (4, 4), (9, 2), (0, most), (25, 29), (29, most)]
    return torch.tensor([rows[i % len(rows)] for i in range(queries)], dtype=torch.int32)[None]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("sinks", [False, True])
def test_ranges_out_of_bounds_end_at_the_last_key(sinks: bool, window: int | None) -> None:
    case = Case(batch=1, queries=100, causal=window is not None, window=window, sinks=sinks)
    assert_is_the_oracle(case, replace(draw_inputs(case, torch.float64), ranges=wild_ranges(100)))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float64).min])
def test_rows_hidden_by_an_additive_mask_are_empty(hidden: float, sinks: bool) -> None:
    case = Case(queries=30, sinks=sinks)
    mask = torch.zeros(2, 1, 30, 30, dtype=torch.float64)
    mask[:, :, 3:9], mask[:, :, :, 20:] = hidden, hidden
    inputs = replace(draw_inputs(case, torch.float64), mask=mask)
    assert_is_the_oracle(case, inputs)
    assert not tiled_results(case, inputs)["out"][:, :, 3:9].any()
