"""Every implementation of attention against the oracle: output, gradients, statistics and dropout, by one table."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_qknorm.ops import library, reference, tiled
from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.types import Heads, Options, Visible
from qknorm_tests.attention_cases import TILED, Case, Implementation, Problem, assert_exact, drawn, problem, raw_problem
from qknorm_tests.attention_tables import BF16, DTYPES, F16, F32, NORMED, SMALL, TABLE
from qknorm_tests.covering import covering
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.norm_cases import Case as Raw
from qknorm_tests.norm_cases import spread
from qknorm_tests.slow import slow_but

ROWS: list[tuple[str, Case, Raw | None, torch.dtype]] = [
    *(("tiled", case, None, DTYPES[i % 3]) for i, case in enumerate(TABLE)),
    *(("cpp", case, None, DTYPES[i % 3]) for i, case in enumerate(case for case in TABLE if case.mask is None)),
    *((name, Case(queries=1), None, F32) for name in ("tiled", "cpp")),  # a single key, whose gradients are zero
    *((("triton", "triton by pointers")[i % 2], case, None, dtype) for i, (case, dtype) in enumerate(SMALL)),
    *((("triton", "triton by pointers")[i % 2], case, raw, raw.dtype) for i, (raw, case) in enumerate(NORMED)),
]


def made(implementation: Implementation, case: Case, raw: Raw | None, dtype: torch.dtype) -> Problem:
    return problem(case, dtype, implementation.device) if raw is None else raw_problem(raw, case)


@pytest.mark.parametrize(("implementation", "case", "raw", "dtype"), ROWS, ids=str, indirect=["implementation"])
def test_output_and_gradients(implementation: Implementation, case: Case, raw: Raw | None, dtype: torch.dtype) -> None:
    made(implementation, case, raw, dtype).check(implementation)


MEASURED = [row for row in ROWS if not row[0].startswith("triton")][::3] + [
    ("triton", Case(causal=True), None, F32),
    ("triton", Case(batch=1, softcap=50.0, spread=3.0), None, BF16),
    ("triton", Case(batch=1, softcap=70.0, causal=True, window=20, spread=3.0), None, F16),
    ("triton", Case(ranges="packed", queries=40, sinks=True), None, BF16),
    ("triton", Case(batch=1, queries=40, dropout=0.3, softcap=50.0), None, F32),
    ("triton", Case(causal=True), Raw(dtype=BF16, heads=(4, 2), length=50, norms=("none", "none"), spread=5.0), BF16),
    ("triton", Case(softcap=50.0, window=9), Raw(dtype=F16, heads=(4, 2), norms=("l2", "layer"), length=50), F16),
]


@pytest.mark.parametrize(("implementation", "case", "raw", "dtype"), MEASURED, ids=str, indirect=["implementation"])
def test_statistics(implementation: Implementation, case: Case, raw: Raw | None, dtype: torch.dtype) -> None:
    given = made(implementation, case, raw, dtype)
    found, exact = implementation.statistics(given), given.exactly()
    plain = given.attended({name: x.detach() for name, x in spread(given.leaves, dtype).items()})
    for x, what in zip(found, ("max_logit", "entropy"), strict=True):
        assert_exact(x, getattr(exact, what), [getattr(plain, what)], what)


@pytest.mark.parametrize("measure", [tiled.head_statistics, cpu.head_statistics], ids=["tiled", "cpp"])
def test_statistics_count_logits_over_the_cap_and_over_half_of_it(measure: Any, compiled: None) -> None:
    """Logits 0, 6 and 12 of one query, then of another that sees the first key alone; and of many."""
    q, k = torch.ones(1, 2, 2, 1), torch.tensor([0.0, 6.0, 12.0]).view(1, 1, 3, 1)
    q[:, 1] = -2.0
    ranges = torch.tensor([[[0, 3], [0, 1]]], dtype=torch.int32)
    got = measure(Heads(q, k, k), Visible(ranges), Options(1.0), 10.0)
    assert [x.tolist() for x in got[2:]] == [[4, 4], [2, 2], [1, 2]]
    assert got.max_logit.tolist() == [12.0, 24.0]
    for case in (Case(queries=150, causal=True, window=70), Case(queries=80, keys=300, ranges="packed", sinks=True)):
        given = problem(case, F32)
        got, seen = measure(*given[:3], 3.0), given.exactly().weights > 0
        q, k = (x.double() for x in given.heads[:2])
        size = (q @ k.repeat_interleave(2, 1).mT).abs() * given.options.scale
        expected = [(seen & (size > limit)).sum((0, 2, 3)).tolist() for limit in (-1.0, 1.5, 3.0)]
        assert [x.tolist() for x in got[2:]] == expected


@pytest.mark.parametrize(
    ("implementation", "rate"),
    covering(["tiled", "cpp", "triton"], [0.3, 0.6], strength=1),
    indirect=["implementation"],
)
def test_dropout_has_its_rate(implementation: Implementation, rate: float) -> None:
    """Each head, query and key draws numbers of its own, the same from the same seed."""
    queries = 48 if implementation.name == "triton" else 100  # more than a block of rows, where it takes less time
    given = problem(
        Case(batch=1, heads=2, heads_kv=1, queries=queries, keys=40, dropout=rate), F32, implementation.device
    )
    factors = []
    for seed in (3, 3, 4):
        visible = given.visible._replace(seed=torch.tensor([seed], device=implementation.device))
        factors.append(drawn(given._replace(visible=visible), implementation.attend))
    assert torch.equal(factors[0], factors[1])
    assert not torch.equal(factors[0], factors[2])
    kept = factors[0][factors[0] > 0]
    assert float(kept.mean()) == pytest.approx(1 / (1 - rate), rel=1e-4)
    deviation = (rate * (1 - rate) / factors[0].numel()) ** 0.5
    assert 1 - kept.numel() / factors[0].numel() == pytest.approx(rate, abs=5 * deviation)
    for lines in (factors[0].flatten(0, 2), factors[0].transpose(2, 3).flatten(0, 2)):
        assert len(lines.unique(dim=0)) == len(lines)


def drawn_row(number: int) -> tuple[Case, torch.dtype]:
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
    if case.dropout and (case.keys or 0) > 256:  # more than the columns of a head, by which `drawn` reads the factors
        case = replace(case, keys=256)
    return case, draw((F32, F32, BF16, F16))


@pytest.mark.parametrize("number", slow_but(range(10), range(300)))
@pytest.mark.parametrize("implementation", ["cpp"], indirect=True)
def test_random_problems(implementation: Implementation, number: int) -> None:
    problem(*drawn_row(number)).check(implementation)


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


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("implementation", ["cpp"], indirect=True)
@pytest.mark.parametrize(("few", "dtype"), FEW_ROWS, ids=str)
def test_the_output_of_few_rows(implementation: Implementation, few: Case, dtype: torch.dtype) -> None:
    """Without gradients, as in a step of generation, C++ has a path of its own. Keys that are hidden are never read."""
    given = problem(few, dtype)
    exact, plain = given.expected(torch.float64), given.expected(dtype)
    with torch.no_grad():
        hidden = given.exactly().weights.sum((1, 2), keepdim=True).mT == 0
        k, v = (x.masked_fill(hidden, torch.nan) for x in given.heads[1:3])
        given = given._replace(heads=given.heads._replace(k=k, v=v))
        got, again = (implementation.attend(given.call(given.leaves)) for _ in range(2))
    assert torch.equal(got, again)
    assert_within_budget(got, exact["out"], plain["out"])


def same(given: Problem, what: str) -> None:
    """Assert that the tiled attention in fp64 is the oracle, but for the rounding of fp64."""
    got = given.results(TILED.attend)
    expected = given.expected(torch.float64, drawn(given, TILED.attend))
    for name, exact in expected.items():
        atol = 1e-12 * max(float(exact.abs().max()), 1.0)
        exact = exact.sum_to_size(got[name].shape)
        torch.testing.assert_close(got[name], exact, rtol=1e-10, atol=atol, msg=lambda m, n=name: f"{what} {n}: {m}")


@pytest.mark.parametrize("logits", [tiled.LOGITS, 4 * 64 * 70 * 2, 1], ids=["whole", "two", "few"])
def test_blocks_of_any_size_are_the_oracle_in_fp64(logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "LOGITS", logits)
    for mask in (None, "left_padding", "bool:BHTS", "add:B11S", "bool:1H1S"):
        case = Case(batch=3, queries=70, causal=True, softcap=50.0, mask=mask, sinks=True, dropout=0.3)
        same(problem(case, torch.float64), str(mask))
        same(problem(replace(case, dropout=0.0, ranges="packed", window=30), torch.float64), f"ranges and {mask}")


def test_gradients_of_many_blocks_are_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in bf16 would round 250 times."""
    monkeypatch.setattr(tiled, "LOGITS", 1)
    problem(Case(batch=1, heads=1, heads_kv=1, queries=4000, keys=100, mask="add:11TS"), BF16).check(TILED)


@pytest.mark.parametrize(
    ("axes", "softcap"), covering(["BHTS", "B1TS", "11TS", "1H1S", "BHT1"], [None, 5.0], strength=1)
)
def test_an_additive_mask_has_a_gradient(softcap: float | None, axes: str) -> None:
    """As of a position bias that a model learns."""
    given = problem(Case(queries=70, causal=True, softcap=softcap, mask=f"add:{axes}"), torch.float64)
    mask = given.visible.mask.requires_grad_()
    outs = [library.attention(*given[:3]), reference.attend(*given[:3]).out]
    got, expected = (torch.autograd.grad(out, mask, given.grad)[0] for out in outs)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_the_caller_do_not_change_the_numbers(mode: type[torch.no_grad]) -> None:
    """Autocast would compute products of fp32 in bf16; memory of inference mode can't be written outside of it."""
    heads = Heads(*(torch.randn(1, 4, 80, 16) for _ in range(3)))
    expected = library.attention(heads, Visible(), Options(1.0, 5.0))
    with mode(), torch.autocast("cpu", torch.bfloat16):
        got = library.attention(Heads(*(x.clone() for x in heads[:3])), Visible(), Options(1.0, 5.0))
    assert torch.equal(got, expected)
