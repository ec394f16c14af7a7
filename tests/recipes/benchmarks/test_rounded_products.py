"""Products of bf16 matrices in fp32, rounded once."""

from __future__ import annotations

import pytest
import torch
from rounded_products import RoundedProducts

PRODUCTS = {
    "mm": lambda x, y: x @ y,
    "bmm": lambda x, y: torch.bmm(x.expand(3, -1, -1), y.expand(3, -1, -1)),
    "addmm": lambda x, y: torch.addmm(x.new_full((1,), 0.25), x, y, beta=0.5, alpha=2.0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_bf16_are_rounded_once(name):
    x, y = torch.randn(33, 300).bfloat16(), torch.randn(300, 20).bfloat16()
    with RoundedProducts():
        found = PRODUCTS[name](x, y)
    exact = PRODUCTS[name](x.double(), y.double())
    assert found.dtype == torch.bfloat16
    limits = exact.abs() * 2.0**-8 + 1e-4  # half a step of bf16, and what a sum in fp32 loses
    assert ((found.double() - exact).abs() <= limits).all()


def test_other_products_stay_as_they_are():
    x = torch.randn(20, 30)
    with RoundedProducts():
        assert torch.equal(x @ x.T, x.mm(x.T))
        assert (x.double() @ x.double().T).dtype == torch.float64


def test_a_linear_layer_under_autocast_and_its_gradients_are_rounded_so():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 48), torch.randn(5, 7, 64)
    results = []
    for mode in (RoundedProducts(), torch.autograd.set_grad_enabled(True)):
        layer.zero_grad()
        with mode, torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
            out.float().square().sum().backward()
        results.append((out, layer.weight.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2.0**-5, atol=2.0**-5)
