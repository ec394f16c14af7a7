"""Second derivatives, forward mode, torch.func and vmap of `library.attention`: right, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_qknorm.ops import library
from qknorm_tests.operator_calls import call
from qknorm_tests.random_qkv import make_qkv


def test_a_second_derivative_is_refused() -> None:
    q, k, v = make_qkv(1, 2, 1, 5, 5, 8)
    (grad,) = torch.autograd.grad(library.attention(*call(q, k, v)).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("wanted", ["q", "k", "v", "sinks"])
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: torch.compile(f, backend="eager")], ids=["plain", "compiled"])
def test_forward_mode_is_refused(wrap: Any, wanted: str) -> None:
    """The operator would return a tangent of zero."""
    torch.compiler.reset()
    tensors = dict(zip("qkv", (x.detach() for x in make_qkv(1, 4, 2, 5, 5, 8)), strict=True)) | {
        "sinks": torch.zeros(4)
    }

    def tangent(x: Tensor) -> Tensor:
        attend = lambda y: library.attention(*call(**tensors | {wanted: y}))  # noqa: E731
        return torch.func.jvp(attend, (x,), (torch.ones_like(x),))[1]

    with pytest.raises(NotImplementedError, match="no forward-mode derivative.*hf_qknorm_eager"):
        wrap(tangent)(tensors[wanted])


FUNCTIONAL = {
    "grad": torch.func.grad,
    "vmap of grad": lambda f: lambda x: torch.vmap(torch.func.grad(f))(x[None]),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones(())),
    "jacrev": torch.func.jacrev,
}


@pytest.mark.parametrize("transform", FUNCTIONAL.values(), ids=FUNCTIONAL)
def test_functional_gradients_are_refused(transform: Any) -> None:
    q, k, v = (x.detach() for x in make_qkv(1, 4, 2, 5, 5, 8))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        transform(lambda x: library.attention(*call(x, k, v)).sum())(q)
