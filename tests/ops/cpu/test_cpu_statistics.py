"""The statistics of the C++ kernels: the oracle's within the error budget, and tiled's counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_qknorm.measure import logits
from hf_qknorm.ops import reference, tiled
from hf_qknorm.ops.cpu import attention, build
from hf_qknorm.ops.types import Call
from qknorm_tests.attention_tables import LENGTH_CASES, OPTION_CASES, RANGE_CASES, SHAPE_CASES
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.operator_calls import call
from qknorm_tests.tiled_cases import Case, draw_inputs

CASES = [x for x in (*LENGTH_CASES, *SHAPE_CASES, *OPTION_CASES, *RANGE_CASES) if x.mask is None and not x.dropout]


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_statistics_are_the_oracles(case: Case) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float16)[CASES.index(case) % 3]
    inputs = draw_inputs(case, dtype)
    with torch.no_grad():
        exact, eager = (
            reference.attend(wide.heads, wide.visible, case.options)
            for wide in map(inputs.to, (torch.float64, torch.float32))
        )
    cap = 4.0 * case.spread**2
    got = attention.head_statistics(inputs.heads, inputs.visible, case.options, cap)
    if exact.max_logit.any():
        assert_within_budget(got.max_logit, exact.max_logit, eager.max_logit)
        assert_within_budget(got.entropy, exact.entropy, eager.entropy, "entropy")
    else:
        assert not got.max_logit.any()
    with torch.no_grad():
        expected = tiled.head_statistics(inputs.heads, inputs.visible, case.options, cap)
    assert got.seen.tolist() == expected.seen.tolist()
    for mine, other in zip(got[3:], expected[3:], strict=True):
        assert int((mine - other).abs().max()) <= 1  # a logit may be rounded across the limit


def test_models_are_measured_by_it_but_for_arbitrary_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    inner = attention.head_statistics
    monkeypatch.setattr(attention, "head_statistics", lambda *given: calls.append(given) or inner(*given))
    q, k = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
    causal = Call(*call(q, k, k, scale=0.25, causal=True))
    found, _ = logits.measure(causal, cap=50.0)
    assert len(calls) == 1
    mask = reference.visible(6, 6, causal=True)[None, None]
    other, _ = logits.measure(Call(*call(q, k, k, scale=0.25, mask=mask)), cap=50.0)
    torch.testing.assert_close(found, other)
    monkeypatch.setenv(build.SWITCH, "0")
    logits.measure(causal, cap=50.0)
    assert len(calls) == 1
