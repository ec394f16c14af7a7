"""Sinks of −∞ have no effect, in the oracle and in the tiled attention, also for rows whose first keys are hidden."""

from __future__ import annotations

import pytest
import torch

from hf_qknorm.ops import reference, tiled
from qknorm_tests.tiled_cases import Case, draw_inputs, oracle_results, tiled_results

CASES = [
    Case(queries=80, causal=True, window=9, sinks=True),
    Case(queries=80, ranges="packed", softcap=5.0, sinks=True),
    Case(queries=80, mask="left_padding", sinks=True),
    Case(queries=20, keys=11, causal=True, sinks=True),  # the first queries see no key
    Case(queries=9, ranges="nothing", sinks=True),
]


@pytest.mark.parametrize("results", [tiled_results, lambda case, inputs: oracle_results(case, inputs)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sink_of_minus_infinity_is_none(case: Case, results) -> None:  # type: ignore[no-untyped-def]
    inputs = draw_inputs(case, torch.float64)
    assert inputs.sinks is not None
    expected = results(case, draw_inputs(Case(**{**vars(case), "sinks": False}), torch.float64))
    inputs.sinks.data[:2] = -torch.inf  # of the first group
    got = results(case, inputs)
    assert all(x.isfinite().all() for x in got.values())
    assert not got["dsinks"][:2].any()
    for name, part in (("out", slice(0, 2)), ("dq", slice(0, 2)), ("dk", slice(0, 1)), ("dv", slice(0, 1))):
        torch.testing.assert_close(got[name][:, part], expected[name][:, part])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_statistics_without_that_sink(case: Case) -> None:
    inputs = draw_inputs(case, torch.float64)
    sinks = torch.full((case.heads,), -torch.inf, dtype=torch.float64)
    q, k, v, mask, ranges = (inputs.q, inputs.k, inputs.v, inputs.mask, inputs.ranges)
    with torch.no_grad():
        found, expected = (
            tiled.head_statistics(inputs.heads, inputs.visible._replace(sinks=x), case.options) for x in (sinks, None)
        )
        options = {"softcap": case.softcap, "causal": case.causal, "window": case.window, "mask": mask}
        oracle = reference.attention(q, k, v, ranges=ranges, sinks=sinks, **options)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.entropy, oracle.entropy)
