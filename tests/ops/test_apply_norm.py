"""Norms in few calls of torch have the numbers of the specification."""

from __future__ import annotations

import pytest
import torch

from hf_qknorm.ops.apply_norm import apply_norm
from hf_qknorm.ops.norms import NORMS, PLAIN, Shape
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
    """Of heads and parameters in these dtypes, of a row of zeros, and for each shape of the norm."""
    x = (9 * torch.randn(2, 5, HEADS, 40)).to(dtypes[0])
    x[0, 0] = 0
    gain, bias = (None if shape is None else torch.randn(shape).to(dtypes[1]) for _ in range(2))
    for used in (None, bias):
        for shape in (None, PLAIN, Shape(19.5), Shape(20.0, 19.0, 1.0), Shape(26.0, 24.0, 4.0)):
            knee = None if shape is None else torch.tensor(shape)
            with torch.set_grad_enabled(grad):
                got = apply_norm(x, Norm(kind, gain, used, 1e-6, 3.0, knee))
                expected = head_norm(x, kind, gain, used, 1e-6, 3.0, knee)
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)
