"""Calls that repeat the launches of earlier ones give the same bits as calls that do not."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_qknorm.ops import operators
from hf_qknorm.ops.registration import Operator, Values, flatten, flatten_norms
from hf_qknorm.ops.triton.launch import Launch, recorded
from hf_qknorm.ops.types import Norm
from qknorm_tests.kernel_cases import Problem, plain_problem, raw_problem, shrink_tiles
from qknorm_tests.norm_cases import Case as Raw
from qknorm_tests.tiled_cases import Case

BRAIN, HALF = torch.bfloat16, torch.float16
SHORT: dict[str, Any] = {"heads": (2, 1), "batch": 1, "length": 9}
CASES = {
    "capped": (Raw(heads=(4, 2), batch=2, length=9, dtype=BRAIN), Case(causal=True, softcap=50.0)),
    "padded columns": (
        Raw(**SHORT, norms=("layer", "rms"), head_dim=40, rotary=(40, "interleaved"), layout="gaps", blend=0.5),
        Case(window=5),
    ),
    "copies": (Raw(**SHORT, dtype=HALF, biases=("shared", "per_head"), layout="sparse"), Case(causal=True)),
    "knees, ranges and sinks": (
        Raw(**SHORT, dtype=BRAIN, gains=("per_head", "scalar"), knee=2.0),
        Case(ranges="packed", sinks=True),
    ),
    "dropout": (Raw(**SHORT, norms=("l2", "lp"), rotary=(0, "none")), Case(dropout=0.3, softcap=5.0)),
    "one key head": (Raw(heads=(4, 1), length=33, dtype=BRAIN), Case(causal=True)),
}


def values_of(problem: Problem) -> Values:
    """The fields of fused attention."""
    return {**flatten(problem.heads, problem.visible, problem.options), "statistics": False}


def varied(values: Values, factor: float) -> Values:
    """The same with other tensors of the same strides, with numbers times `factor`; another seed."""

    def other(name: str, x: Tensor) -> Tensor:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return made.copy_(x * factor if x.is_floating_point() else x + (name == "seed"))

    return {name: other(name, x.detach()) if isinstance(x, Tensor) else x for name, x in values.items()}


def check(operator: Operator, values: Values) -> Any:
    """Assert that `direct` repeats its third call, with the results of `run`; returns these."""
    for factor in (1.0, 0.75, 1.25):
        launched: list[Launch] = []
        now = varied(values, factor)
        with recorded(launched):  # by `launch`, which a repeated call passes over
            found = operator.direct(now)
        assert bool(launched) == (factor != 1.25)
    expected = operator.run(now)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return expected


@pytest.mark.costly
@pytest.mark.parametrize("name", CASES)
def test_repeated_attention_has_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, case = CASES[name]
    if name == "one key head":  # several programs share a block of keys
        shrink_tiles(monkeypatch, processors=8)
    problem = raw_problem(raw, case)
    values = values_of(problem)
    out, normaliser, *_ = check(operators.FUSED_ATTENTION, values)
    kept = {"grad": problem.grad, "out": out, "normaliser": normaliser}
    check(operators.FUSED_ATTENTION_BACKWARD, kept | values)


@pytest.mark.parametrize("alone", [False, True])
def test_repeated_norms_have_the_same_bits(alone: bool) -> None:
    q, k, _, *norms = raw_problem(Raw(**SHORT, biases=("shared", "none")), Case()).heads
    values = {"q": q, "k": None if alone else k, **flatten_norms(*norms)}
    check(operators.NORM_ROPE_HEADS, values)
    check(operators.NORM_ROPE_BACKWARD, {"dq": q, "dk": k} | values)


@pytest.mark.parametrize("window", [None, 310])
@pytest.mark.parametrize("queries", [1, 3])
def test_one_plan_serves_a_growing_cache(queries: int, window: int | None) -> None:
    """Keys are divided anew at 512 of them: each division is seen, recorded and repeated."""
    launches = []
    for keys in (300, 301, 303, 511, 512, 600, 601):
        case = Case(batch=1, heads=2, heads_kv=1, queries=queries, keys=keys, causal=True, window=window)
        values = varied(values_of(plain_problem(case, BRAIN)), 1.0)
        launched: list[Launch] = []
        with recorded(launched):
            found = operators.FUSED_ATTENTION.direct(values)
        if not launched:
            torch.testing.assert_close(found, operators.FUSED_ATTENTION.run(values), rtol=0, atol=0)
        launches.append(bool(launched))
    assert launches == [True, True, False, False, True, True, False]


def test_every_number_is_part_of_the_signature() -> None:
    """After repeated calls, a call with another eps, scale or option is computed with it."""
    problem = raw_problem(Raw(**SHORT), Case(causal=True, softcap=2.0, dropout=0.2))
    values = varied(values_of(problem), 1.0)
    results = [operators.FUSED_ATTENTION.direct(values)[0] for _ in range(3)]
    others = {"q_eps": 0.5, "k_kind": "l2", "scale": 0.4, "softcap": 3.0, "causal": False, "window": 4, "dropout": 0.5}
    results += [operators.FUSED_ATTENTION.direct(values | {name: x})[0] for name, x in others.items()]
    first, *again = results[:3]
    assert all(torch.equal(first, x) for x in again)
    for i, x in enumerate(results[2:]):
        assert not any(torch.equal(x, y) for y in results[2:][:i])


def test_a_plan_keeps_no_tensor() -> None:
    problem = raw_problem(Raw(**SHORT, biases=("shared", "per_head")), Case(sinks=True))
    values = varied(values_of(problem), 1.0)
    for _ in range(3):
        out, normaliser, *_ = operators.FUSED_ATTENTION.direct(values)
        backward = {"grad": problem.grad, "out": out, "normaliser": normaliser} | values
        gradients = operators.FUSED_ATTENTION_BACKWARD.direct(backward)
    made = [x for x in (*backward.values(), *gradients) if isinstance(x, Tensor) and x is not problem.grad]
    watched = [weakref.ref(x) for x in made]
    del made, backward, values, out, normaliser, gradients
    gc.collect()
    assert len(watched) > 15
    assert not any(watch() is not None for watch in watched)


def test_two_tensors_in_one_place_are_not_recorded() -> None:
    """A plan could not tell which of them a kernel's argument was."""
    q, k, v = plain_problem(Case(heads=2, queries=9), BRAIN).heads[:3]
    values = {"q": q, "k": k, **flatten_norms(Norm("rms"), Norm("rms"), None)}
    for second in (q, q, q, k):
        found = operators.NORM_ROPE_HEADS.direct(values | {"k": second})
    torch.testing.assert_close(found, operators.NORM_ROPE_HEADS.run(values), rtol=0, atol=0)
