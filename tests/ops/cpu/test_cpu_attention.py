"""The C++ kernels and their statistics within the error budget of the oracle: every shape and option but masks."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from hf_qknorm.measure import logits
from hf_qknorm.ops import reference, tiled
from hf_qknorm.ops.cpu import attention, build
from hf_qknorm.ops.types import Call
from qknorm_tests.attention_tables import LENGTH_CASES, OPTION_CASES, RANGE_CASES, SHAPE_CASES
from qknorm_tests.covering import covering
from qknorm_tests.cpu_cases import cpu_dropout, cpu_results, linear_memory_terms
from qknorm_tests.error_budget import assert_within_budget, verdict
from qknorm_tests.operator_calls import call
from qknorm_tests.tiled_cases import Case, draw_inputs, oracle_terms

F32, BF16, F16 = DTYPES = torch.float32, torch.bfloat16, torch.float16
CASES = [case for case in (*LENGTH_CASES, *SHAPE_CASES, *OPTION_CASES, *RANGE_CASES) if case.mask is None]

FEW_ROWS = [
    (Case(heads=heads, heads_kv=heads_kv, queries=queries, keys=keys, head_dim=head_dim, causal=True, **options), dtype)
    for (heads, heads_kv, queries), (keys, head_dim), options, dtype in covering(
        ((3, 3, 1), (4, 2, 1), (3, 1, 1), (8, 1, 1), (4, 2, 3), (1, 1, 5)),
        ((7, 64), (256, 40), (1100, 16), (600, 192)),
        (
            {},
            {"softcap": 5.0},
            {"softcap": 70.0, "ranges": "left_padding", "sinks": True},
            {"window": 300, "sinks": True},
        ),
        DTYPES,
    )
]


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Threads that share the keys of a head."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def assert_is_the_oracle(case: Case, dtype: torch.dtype) -> None:
    """Each result has the budget of the larger error of two plain ones: autograd's, and that of linear memory."""
    inputs = draw_inputs(case, dtype)
    dropped = cpu_dropout(case, inputs)
    exact = oracle_terms(case, inputs.to(torch.float64), None if dropped is None else dropped.double())
    plain = oracle_terms(case, inputs, dropped), linear_memory_terms(case, inputs, dropped)
    with torch.no_grad():
        alone = attention.attention(Call(inputs.heads, inputs.visible, case.options))
    for name, result in (*cpu_results(case, inputs).items(), ("out", alone)):
        assert result.dtype == dtype
        assert result.isfinite().all(), name
        if exact[name].any():
            found = [verdict(result, exact[name], terms[name]) for terms in plain]
            assert any(x.passed for x in found), (name, found)
        else:
            most = 2 * largest(plain[1][name]) + 64 * torch.finfo(F32).eps
            assert largest(result) <= most, name


def drawn_case(number: int) -> tuple[Case, torch.dtype]:
    """A random problem: logits near each other or far apart, caps far above and far below them, and any scale."""
    draw = random.Random(number).choice
    heads_kv = draw((1, 1, 2, 3))
    case = Case(
        batch=draw((1, 2, 3)),
        heads=heads_kv * draw((1, 2, 4, 5, 7)),
        heads_kv=heads_kv,
        queries=draw(range(1, 150)),
        keys=draw((None, None, *range(1, 300, 7))),
        head_dim=draw((8, 16, 24, 33, 40, 64, 72, 80, 96, 128, 256)),
        causal=draw((False, True, True)),
        window=draw((None, None, 7, 40)),
        softcap=draw((None, 0.1, 5.0, 30.0, 50.0, 64.0, 80.0, 10000.0)),
        ranges=draw((None, None, "left_padding", "right_padding", "window", "shared")),
        sinks=draw((False, False, True)),
        dropout=draw((0.0, 0.0, 0.2, 0.6)),
        spread=draw((0.1, 0.3, 0.5, 1.0, 2.0, 5.0)),
    )
    return case, draw((F32, F32, BF16, F16))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every third problem of the tables and a few random ones, or with `--all-families` all and 1,000."""
    every = metafunc.config.getoption("--all-families")
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES if every else CASES[::3], ids=str)
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(1000 if every else 12))


def test_every_problem_is_within_the_budget(case: Case) -> None:
    number = CASES.index(case)
    assert_is_the_oracle(case, F32)
    if number % 4 == 0:
        assert_is_the_oracle(case, BF16 if number % 8 else F16)
    if not case.dropout:
        assert_statistics_are_the_oracles(case, DTYPES[number // 3 % 3])


def assert_statistics_are_the_oracles(case: Case, dtype: torch.dtype) -> None:
    inputs, cap = draw_inputs(case, dtype), 4.0 * case.spread**2
    with torch.no_grad():
        exact, eager = (
            reference.attend(wide.heads, wide.visible, case.options) for wide in map(inputs.to, (torch.float64, F32))
        )
        got, counts = (
            head_statistics(inputs.heads, inputs.visible, case.options, cap)
            for head_statistics in (attention.head_statistics, tiled.head_statistics)
        )
    if exact.max_logit.any():
        assert_within_budget(got.max_logit, exact.max_logit, eager.max_logit)
        assert_within_budget(got.entropy, exact.entropy, eager.entropy, "entropy")
    else:
        assert not got.max_logit.any()
    assert got.seen.tolist() == counts.seen.tolist()
    for mine, other in zip(got[3:], counts[3:], strict=True):
        assert int((mine - other).abs().max()) <= 1  # a logit may be rounded across the limit


def test_a_layer_is_measured_alike_with_a_mask_and_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
    causal = Call(*call(q, k, k, scale=0.25, causal=True))
    mask = reference.visible(6, 6, causal=True)[None, None]
    found = [logits.measure(x, cap=0.5)[0] for x in (causal, Call(*call(q, k, k, scale=0.25, mask=mask)))]
    monkeypatch.setenv(build.SWITCH, "0")
    found.append(logits.measure(causal, cap=0.5)[0])
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("few", "dtype"), FEW_ROWS, ids=str)
def test_few_rows_are_within_the_budget(few: Case, dtype: torch.dtype) -> None:
    """The output alone, as in a step of generation: of one head, and with the keys shared out among threads."""
    inputs = draw_inputs(few, dtype)
    exact, eager = oracle_terms(few, inputs.to(torch.float64)), oracle_terms(few, inputs)
    with torch.no_grad():
        got, again = (attention.attention(Call(inputs.heads, inputs.visible, few.options)) for _ in range(2))
    assert got.dtype == dtype
    assert torch.equal(got, again)
    assert_within_budget(got, exact["out"], eager["out"])


def test_random_problems_are_within_the_budget(number: int) -> None:
    assert_is_the_oracle(*drawn_case(number))
