"""Norm and RoPE of queries and keys in one launch against the oracle's norms and a plain rotation."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from hf_qknorm.ops.norms import NORMS
from hf_qknorm.ops.triton import norm_rope
from hf_qknorm.ops.triton.arguments import HeadArguments
from hf_qknorm.ops.triton.launch import launch
from hf_qknorm.ops.triton.norm_rope_kernel import _entries
from hf_qknorm.ops.types import Norm
from qknorm_tests.covering import covering
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.norm_cases import CASES, DEVICE, KNEES, Case, draw, expected, gradients_like


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(case: Case) -> None:
    call = draw(case)
    dq, dk = gradients_like(call)
    exact_q, exact_k, exact = expected(call, dq, dk, torch.float64)
    eager_q, eager_k, eager = expected(call, dq, dk, case.dtype)
    made = norm_rope.forward(*call, bounded=True)
    assert made.k is not None
    assert made.q.is_contiguous()
    assert made.k.is_contiguous()
    assert_within_budget(made.q, exact_q, eager_q, "q")
    assert_within_budget(made.k, exact_k, eager_k, "k")
    got = norm_rope.backward(dq, dk, *call)._asdict()
    assert {name for name, value in got.items() if value is not None} == set(exact)
    for name, value in exact.items():
        assert got[name].shape == call.leaves[name].shape
        assert got[name].dtype == case.dtype
        assert_within_budget(got[name], value, eager[name], f"gradient of {name}")
    assert got["q"].transpose(1, 2).is_contiguous()
    assert got["k"].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("case", [CASES[3], CASES[11], CASES[14], *KNEES[:4], KNEES[6]], ids=str)
def test_the_bound_is_the_longest_row(case: Case) -> None:
    """Also with a knee, where rows differ in length and gains are larger."""
    call = draw(case)
    made = norm_rope.forward(*call, bounded=True)
    groups = (case.batch, case.heads[1], -1)
    sizes = [x.double().norm(dim=-1).view(groups).amax(-1) for x in (made.q, made.k)]
    torch.testing.assert_close(made.bound.double(), torch.stack(sizes, -1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("kind", "knee"), covering(NORMS, [None, 4.0], strength=1))
def test_rows_of_zeros_stay_and_get_no_gradient(kind: str, knee: float | None) -> None:
    call = draw(Case(norms=(kind, kind), length=9, knee=knee))
    call.q.zero_()
    made = norm_rope.forward(*call, bounded=True)
    got = norm_rope.backward(*gradients_like(call), *call)
    assert not made.q.any()
    assert not got.q.any()
    assert not got.q_gain.any()


@pytest.mark.parametrize(("kind", "knee"), [("rms", None), ("lp", 4.0)])
def test_one_tensor_alone(kind: str, knee: float | None) -> None:
    call = draw(Case(norms=(kind, "none"), gains=("per_head", "none"), rotary=(0, "none"), knee=knee))
    both = norm_rope.forward(*call, bounded=True)
    made = norm_rope.forward(call.q, None, call.q_norm, Norm(), None, call.factor)
    assert made.k is None
    assert made.bound is None
    torch.testing.assert_close(made.q, both.q, rtol=0, atol=0)
    dq, dk = gradients_like(call)
    got = norm_rope.backward(dq, None, call.q, None, call.q_norm, Norm(), None, call.factor)
    wanted = norm_rope.backward(dq, dk, *call)
    assert got.k is None
    torch.testing.assert_close((got.q, got.q_gain), (wanted.q, wanted.q_gain), rtol=0, atol=0)


def test_the_gradient_of_a_sum() -> None:
    """It is an expanded number, with strides of zero."""
    call = draw(Case(length=5))
    ones = [torch.ones(1, device=DEVICE).expand(x.shape) for x in (call.q, call.k)]
    got = norm_rope.backward(*ones, *call)
    wanted = norm_rope.backward(*(x.contiguous() for x in ones), *call)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@triton.jit
def _offsets(tensor, head, out, N: tl.constexpr):
    i = tl.arange(0, N)
    at = _entries(tensor, tl.program_id(0) + 1, tl.program_id(0) + head, i + 2**15, i)
    tl.store(out + i[:, None] * N + i[None, :], at)


def test_addresses_have_64_bits() -> None:
    out = torch.zeros(16, 16, dtype=torch.int64, device=DEVICE)
    launch(_offsets, (1,), DEVICE, HeadArguments(out, 2**31 - 16, 2**30, 2**17), 7, out, N=16)
    i = torch.arange(16, device=DEVICE)
    assert torch.equal(out, (2**31 - 16) + 7 * 2**30 + (i[:, None] + 2**15) * 2**17 + i[None, :])
