"""Products of bf16 matrices in fp32, rounded once."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from rounded_products import PRODUCTS as OPERATORS
from rounded_products import RoundedProducts
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {
    "mm": lambda x, y: x @ y,
    "bmm": lambda x, y: torch.bmm(x.expand(3, -1, -1), y.expand(3, -1, -1)),
    "addmm": lambda x, y: torch.addmm(x.new_full((1,), 0.25), x, y, beta=0.5, alpha=2.0),
}


class Seen(TorchDispatchMode):
    """The dtypes of the products that reach torch's own kernels."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in OPERATORS:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_bf16_are_rounded_once(name):
    x, y = torch.randn(33, 300).bfloat16(), torch.randn(300, 20).bfloat16()
    with Seen() as seen, RoundedProducts():
        found = PRODUCTS[name](x, y)
    exact = PRODUCTS[name](x.double(), y.double())
    assert seen.dtypes == [torch.float32]
    assert found.dtype == torch.bfloat16
    limits = exact.abs() * 2.0**-8 + 1e-4  # half a step of bf16, and what a sum in fp32 loses
    assert ((found.double() - exact).abs() <= limits).all()


def test_other_products_stay_as_they_are():
    x = torch.randn(20, 30)
    expected = x @ x.T, x.double() @ x.double().T
    with RoundedProducts():
        assert all(map(torch.equal, (x @ x.T, x.double() @ x.double().T), expected))


def test_a_linear_layer_under_autocast_and_its_gradients_are_rounded_so():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 48), torch.randn(5, 7, 64)
    results, seen = [], Seen()
    for mode in (RoundedProducts(), nullcontext()):
        layer.zero_grad()
        with seen, mode, torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
            out.float().square().sum().backward()
        results.append((out, layer.weight.grad))
    assert seen.dtypes[:2] == [torch.float32] * 2  # forward and backward, of the first pass
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2.0**-5, atol=2.0**-5)
