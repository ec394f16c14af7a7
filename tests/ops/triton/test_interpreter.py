"""Triton's interpreter, corrected, computes bf16 as a GPU does: tests without a GPU rely on it."""

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from hf_qknorm.ops.triton.launch import launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="compiled kernels may compute in bf16")


@triton.jit
def _product(a, b, out, head, ROWS: tl.constexpr, D: tl.constexpr):
    x = a.load([1, head, 32, 0]).reshape(ROWS, D)
    y = b.load([1, head, 32, 0]).reshape(ROWS, D)
    rows = tl.arange(0, ROWS)
    tl.store(out + rows[:, None] * ROWS + rows[None, :], tl.dot(x, y.trans()))


@triton.jit
def _copy(x, out, length, STEP: tl.constexpr):
    for start in tl.range(0, length, STEP):
        i = start + tl.arange(0, STEP)
        tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def _double(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(out + i, value + value)


def test_dots_of_descriptor_tiles_are_of_values_and_end_at_the_last_row() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 3, 41, 16, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(2))
    whole = torch.full((2, 3, 64, 32), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    whole[:, :, :41, :16] = a
    view = whole[:, :, :41, :16]  # its rows and heads have data behind their ends, which must not be read
    out = torch.empty(16, 16, device=DEVICE)
    tiles = [TensorDescriptor.from_tensor(x, [1, 1, 16, 16]) for x in (view, b)]
    launch(_product, (1,), DEVICE, *tiles, out, 2, ROWS=16, D=16)
    exact = a[1, 2, 32:].double() @ b[1, 2, 32:].double().T
    torch.testing.assert_close(out[:9, :9].double(), exact, rtol=1e-5, atol=1e-5)
    assert not out[9:].any()
    assert not out[:, 9:].any()


def test_casts_round_to_nearest() -> None:
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1 + 2**-8, 1 + 3 * 2**-8, 1e-40, 3.4e38])
    x = torch.cat([torch.randn(248, generator=generator), special]).to(DEVICE)
    narrow, wide = torch.empty(256, dtype=torch.bfloat16, device=DEVICE), torch.empty(256, device=DEVICE)
    launch(_copy, (1,), DEVICE, x, narrow, 256, STEP=64)
    launch(_copy, (1,), DEVICE, narrow, wide, 256, STEP=64)
    torch.testing.assert_close(narrow, x.bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(wide, narrow.float(), rtol=0, atol=0)


@INTERPRETED
def test_arithmetic_on_bf16_is_refused() -> None:
    x = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="cast to fp32 first"):
        launch(_double, (1,), DEVICE, x, torch.empty_like(x), N=16)
