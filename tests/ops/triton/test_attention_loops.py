"""The variants of fused attention's inner loop: which heads each serves, and their results at the cap and with NaN."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_qknorm.ops import reference
from hf_qknorm.ops.triton import attention
from qknorm_tests.covering import covering
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.kernel_cases import DEVICE, Problem, Raw, plain_problem, raw_problem, shrink_tiles
from qknorm_tests.memory import fill_new_memory
from qknorm_tests.tiled_cases import Case

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
CAPS = (None, 5.0, 50.0, 64.0, 70.0)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_tiles(monkeypatch)


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory has plausible numbers."""
    fill_new_memory(monkeypatch, 7.0)


def two_groups(
    dtype: torch.dtype, softcap: float | None, low: float, high: float, sinks: bool = False, knee: float | None = None
) -> Problem:
    """Normed heads whose scores are bounded by about `low` for the first group, by `high` for the second."""
    raw = Raw(heads=(4, 2), dtype=dtype, gains=("per_head", "none"), length=40, rotary=(0, "none"), knee=knee)
    problem = raw_problem(raw, Case(causal=True, softcap=softcap, sinks=sinks))
    (q, k, _, q_norm, k_norm, _), scale = problem.heads, problem.options.scale / (softcap or 1.0)
    q, k = (
        reference.norm_rope_one(x, norm._replace(gain=None), None).norm(dim=-1)
        for x, norm in ((q, q_norm), (k, k_norm))
    )
    size = (
        q.unflatten(1, (2, 2)).amax((0, 2, 3)) * k.amax((0, 2)) * scale
    )  # the largest score of each group for a gain of 1
    wanted = torch.tensor([low, high], device=DEVICE) / size
    q_norm.gain.copy_(wanted.repeat_interleave(2)[:, None].expand_as(q_norm.gain))
    return problem


BOUNDS = [  # dtype, cap, sinks, knee, bounds of the two groups: a loop without a maximum, or with another tanh, and not
    (BRAIN, None, False, None, (55.0, 400.0)),
    (BRAIN, None, False, 4.0, (55.0, 400.0)),
    (BRAIN, 50.0, False, None, (0.55, 2.0)),
    (BRAIN, 100.0, False, 4.0, (0.55, 9.0)),
    (HALF, 5.0, True, None, (0.55, 40.0)),
]


@pytest.mark.parametrize(("dtype", "softcap", "sinks", "knee", "bounds"), BOUNDS)
def test_the_bound_of_a_group_of_heads_chooses_its_loop(
    dtype: torch.dtype, softcap: float | None, sinks: bool, knee: float | None, bounds: tuple[float, float]
) -> None:
    """The loop of the first group would overflow in the second, or be far from tanh."""
    two_groups(dtype, softcap, *bounds, sinks, knee).check()


@pytest.mark.parametrize(("softcap", "dtype"), covering(CAPS, [FULL, BRAIN, HALF], strength=1), ids=str)
def test_logits_driven_to_the_cap(softcap: float | None, dtype: torch.dtype) -> None:
    case = Case(batch=1, queries=40, causal=True, softcap=softcap, spread=12.0)
    if dtype == FULL:  # with larger logits few rows would be below the cap, and have all of the gradient
        case = dataclasses.replace(case, heads=8, heads_kv=8, spread=5.0)
    plain_problem(case, dtype).check()


LARGE = [
    (Case(batch=1, heads=8, queries=40, spread=5.0, sinks=True, window=9), None),
    (Case(batch=1, heads=8, queries=3, keys=260, spread=5.0, causal=True), None),
    (Case(batch=1, heads=6, queries=40, ranges="left_padding", spread=5.0), None),
    (Case(causal=True), Raw(heads=(8, 2), length=40, spread=5.0, norms=("none", "none"))),
]


@pytest.mark.parametrize(("case", "raw"), LARGE, ids=str)
def test_fp32_is_exact_for_large_logits_without_a_cap(case: Case, raw: Raw | None) -> None:
    """One fp32 number for the log-sum-exp of such logits would exceed the error budget of the weights."""
    problem = plain_problem(case, FULL) if raw is None else raw_problem(raw, case)
    problem.check()


SINKLESS = [
    Case(queries=40, causal=True, window=20, sinks=True),
    Case(queries=40, ranges="left_padding", softcap=5.0, sinks=True),
    Case(queries=40, ranges="packed", sinks=True),
    Case(queries=20, ranges="nothing", sinks=True),
    Case(queries=2, keys=300, ranges="window", sinks=True),
]


@pytest.mark.parametrize(("case", "dtype"), covering(SINKLESS, [FULL, BRAIN], strength=1), ids=str)
def test_a_sink_of_minus_infinity_is_none(case: Case, dtype: torch.dtype) -> None:
    """Also for rows whose first tile is hidden."""
    problem = plain_problem(case, dtype)
    sinks = problem.visible.sinks
    assert sinks is not None
    sinks.data[:2] = -torch.inf
    if case.ranges == "nothing":
        got = problem.results()
        assert not any(x.any() for x in got.values())
        return
    got = problem.check()
    assert not got["sinks"][:2].any()


NAN = [
    (Case(causal=True), None),
    (Case(causal=True, softcap=50.0), None),
    (Case(causal=True, softcap=70.0, sinks=True), None),
    (Case(causal=True), Raw(heads=(4, 2), dtype=BRAIN)),
    (Case(causal=True, softcap=50.0), Raw(heads=(4, 2), dtype=BRAIN)),
]


@pytest.mark.parametrize(("given", "where"), covering(NAN, ["q", "k", "v"], strength=1), ids=str)
@pytest.mark.usefixtures("stale")
def test_nan_comes_out_where_it_goes_in(given: tuple[Case, Raw | None], where: str) -> None:
    case, raw = given
    problem = raw_problem(raw, case) if raw else plain_problem(dataclasses.replace(case, batch=1), BRAIN)
    exact, eager = problem.expected(torch.float64)["out"], problem.expected(BRAIN)["out"]
    getattr(problem.heads, where)[:, 1, 50, 3] = torch.nan
    result = attention.forward(problem.heads, problem.visible, problem.options, statistics=True)
    got = attention.backward(
        problem.grad, problem.heads, problem.visible, problem.options, result.out, result.normaliser
    )
    assert_within_budget(result.out[:, :, :32], exact[:, :, :32], eager[:, :, :32])  # no tile of these has NaN
    if where == "q":
        queries, keys = (slice(None), 1, 50), (slice(None), 0, slice(51))
    else:
        queries, keys = (slice(None), slice(2, 4), slice(50, None)), (slice(None), 1)
    column = 3 if where == "v" else slice(None)
    assert result.out[queries][..., column].isnan().all()
    assert got.q[queries].isnan().all()
    assert got.k[keys].isnan().all()
    if where != "v":  # the weights themselves
        assert result.entropy[queries].isnan().all()
        assert got.v[keys].isnan().all()
