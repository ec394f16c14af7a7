"""Norms in few calls of torch have the numbers of the specification."""

from __future__ import annotations

import pytest
import torch

from hf_qknorm.ops.apply_norm import apply_norm
from hf_qknorm.ops.norms import NORMS
from hf_qknorm.ops.reference import head_norm
from hf_qknorm.ops.types import Norm
from qknorm_tests.covering import covering

HEADS = 3
DTYPES = ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float64,) * 2, (torch.bfloat16, torch.float32))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("dtypes", "kind", "shape", "grad"),
    covering(DTYPES, NORMS, [(40,), (HEADS, 40), (1,), None], [False, True]),
    ids=str,
)
def test_the_numbers_are_those_of_the_specification(dtypes, kind, shape, grad):
    """Of heads and parameters in these dtypes, of a row of zeros, and with ε as a number or a tensor."""
    x = (9 * torch.randn(2, 5, HEADS, 40)).to(dtypes[0])
    x[0, 0] = 0
    gain, bias = (None if shape is None else torch.randn(shape).to(dtypes[1]) for _ in range(2))
    for used in (None, bias):
        for eps, sharpness in ((1e-6, 1), (torch.tensor(0.7), 1), (torch.tensor(81.0), 4)):
            with torch.set_grad_enabled(grad):
                got = apply_norm(x, Norm(kind, gain, used, None, eps, 3.0, sharpness))
                expected = head_norm(x, kind, gain, used, eps, 3.0, None, sharpness)
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)


def test_a_blend_is_applied():
    x, blend = torch.randn(1, 2, HEADS, 16), torch.tensor(0.25)
    with torch.no_grad():
        got = apply_norm(x, Norm("rms", blend=blend))
    torch.testing.assert_close(got, x + blend * (head_norm(x, "rms") - x))


def test_inference_calls_torch_once(monkeypatch):
    calls, fused = [], torch.rms_norm
    monkeypatch.setattr(torch, "rms_norm", lambda *args: calls.append(args) or fused(*args))
    x, gain = torch.randn(1, 2, HEADS, 16), torch.randn(16)
    with torch.no_grad():
        apply_norm(x, Norm("rms", gain))
    assert len(calls) == 1
    assert calls[0][2] is gain
    apply_norm(x, Norm("rms", gain))
    assert len(calls) == 1
