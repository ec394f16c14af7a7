"""The C++ kernels within the error budget of the oracle: every shape and option but masks, in every dtype."""

from __future__ import annotations

import pytest
import torch
from attention_tables import LENGTH_CASES, OPTION_CASES, RANGE_CASES, SHAPE_CASES
from cpu_cases import cpu_dropout, cpu_results
from error_budget import assert_within_budget
from tiled_cases import Case, draw_inputs, oracle_terms

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES = [case for case in (*LENGTH_CASES, *SHAPE_CASES, *OPTION_CASES, *RANGE_CASES) if case.mask is None]


def assert_is_the_oracle(case: Case, dtype: torch.dtype) -> None:
    inputs = draw_inputs(case, dtype)
    dropped = cpu_dropout(case, inputs)
    exact = oracle_terms(case, inputs.to(torch.float64), None if dropped is None else dropped.double())
    eager = oracle_terms(case, inputs, dropped)
    for name, result in cpu_results(case, inputs).items():
        assert result.dtype == dtype
        if exact[name].any():
            assert_within_budget(result, exact[name], eager[name], name)
        else:
            assert float(result.abs().max() if result.numel() else 0) <= 64 * torch.finfo(F32).eps, name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_problem_is_within_the_budget(case: Case) -> None:
    assert_is_the_oracle(case, F32)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_half_precision_is_within_the_budget(case: Case, dtype: torch.dtype) -> None:
    assert_is_the_oracle(case, dtype)
