"""The tiled attention in the dtypes that models use: within the error budget, finite for logits of any size."""

import pytest
import torch

from hf_qknorm.ops import tiled
from qknorm_tests.covering import covering
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.tiled_cases import Case, draw_inputs, drawn_dropout, oracle_terms, tiled_results

CAPS = (None, 5.0, 50.0, 70.0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    *(Case(queries=111, head_dim=64, softcap=cap, spread=spread) for cap in CAPS for spread in (0.3, 3.0)),
    *(Case(queries=111, head_dim=d, causal=True, softcap=50.0) for d in (16, 40, 96, 256)),
    Case(heads=7, heads_kv=1, queries=111, head_dim=64, causal=True, softcap=50.0),
    *(Case(queries=111, head_dim=64, softcap=cap, mask=m) for cap, m in ((None, "bool:B1TS"), (50.0, "add:BHTS"))),
    *(Case(queries=111, head_dim=64, causal=True, softcap=cap, sinks=True, window=30) for cap in CAPS),
    *(Case(queries=111, head_dim=64, causal=True, softcap=cap, dropout=0.2) for cap in CAPS),
    *(Case(queries=n, keys=s, head_dim=64, causal=True, softcap=50.0) for n, s in ((1, 111), (65, 200), (111, 63))),
    Case(batch=1, heads=2, heads_kv=1, queries=1000, head_dim=64, causal=True),
]
AT_THE_CAP = [
    (Case(queries=111, head_dim=64, causal=True, softcap=softcap, sinks=sinks, spread=8.0), dtype)
    for sinks, softcap, dtype in covering((False, True), (5.0, 50.0, 64.0, 70.0), DTYPES)
]


@pytest.mark.parametrize(("case", "dtype"), [*covering(CASES, DTYPES, strength=1), *AT_THE_CAP], ids=str)
def test_output_and_gradients_are_within_the_budget(case: Case, dtype: torch.dtype) -> None:
    inputs = draw_inputs(case, dtype)
    dropped = drawn_dropout(case, inputs)
    exact = oracle_terms(case, inputs.to(torch.float64), None if dropped is None else dropped.double())
    eager = oracle_terms(case, inputs, dropped)
    got = tiled_results(case, inputs)
    assert got.keys() == exact.keys()
    for name, result in got.items():
        assert result.dtype == dtype
        assert_within_budget(result, exact[name], eager[name], name)


@pytest.mark.parametrize(("softcap", "dtype"), covering(CAPS, DTYPES, strength=1), ids=str)
def test_a_single_key_is_within_the_budget(softcap: float | None, dtype: torch.dtype) -> None:
    case = Case(queries=1, head_dim=64, causal=True, softcap=softcap)
    inputs = draw_inputs(case, dtype)
    exact, eager = oracle_terms(case, inputs.to(torch.float64)), oracle_terms(case, inputs)
    got = tiled_results(case, inputs)
    for name in ("out", "dv"):
        assert_within_budget(got[name], exact[name], eager[name], name)
    for name in ("dq", "dk"):  # exactly zero, so only the absolute rounding error in fp32 counts
        assert float(exact[name].abs().max()) == 0
        assert float(got[name].abs().max()) <= 64 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(("mask", "softcap", "dtype"), covering((None, "bool:B1TS", "add:B1TS"), CAPS, DTYPES), ids=str)
def test_logits_of_ten_thousand_stay_finite(mask: str | None, softcap: float | None, dtype: torch.dtype) -> None:
    case = Case(queries=111, head_dim=64, causal=True, softcap=softcap, mask=mask, spread=40.0)
    inputs = draw_inputs(case, dtype)
    with torch.no_grad():
        seen = tiled.head_statistics(inputs.heads, inputs.visible, case.options)
    assert float(seen.max_logit.min()) > 5e3
    assert torch.isfinite(seen.entropy).all()
    results = tiled_results(case, inputs)
    assert all(torch.isfinite(result).all() for result in results.values())
    exact, eager = oracle_terms(case, inputs.to(torch.float64)), oracle_terms(case, inputs)
    for name, result in results.items():
        assert_within_budget(result, exact[name], eager[name], name)
