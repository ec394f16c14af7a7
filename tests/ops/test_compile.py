"""`library.attention` under torch.compile: one opaque node, no graph break, no recompilation for each length."""

import shutil
from collections.abc import Iterator

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hf_qknorm.ops import library
from qknorm_tests.covering import covering
from qknorm_tests.operator_calls import call

pytestmark = [
    pytest.mark.costly,
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),  # torch's own
]
SINKS = torch.linspace(-1, 2, 4)
OPTIONS = {
    "plain": {},
    "capped": {"softcap": 5.0, "causal": True},
    "window": {"causal": True, "window": 4},
    "mask": {"softcap": 5.0, "mask": torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()},
    "sinks": {"sinks": SINKS, "causal": True},
    "dropout": {"dropout": 0.25},
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Disable the compilers' caches: their keys do not include the operator's fake."""
    torch._dynamo.reset()
    inductor, functorch = torch._inductor.config, torch._functorch.config
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield


def projected(x: Tensor, options: dict) -> Tensor:
    """Split and join heads by transposed views, as a model does around attention."""
    q = x.unflatten(-1, (4, 16)).transpose(1, 2) * 2
    k, v = q[:, ::2], q[:, 1::2]
    return library.attention(*call(q, k, v, **options)).transpose(1, 2).flatten(2).sin()


def output_and_gradient(function, x: Tensor, options: dict) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    out = function(x, options)
    return out.detach(), torch.autograd.grad(out.sum(), x)[0]


def draw(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize(("name", "batch"), covering(OPTIONS, [1, 2], strength=1))
def test_the_compiled_function_is_the_plain_one(name: str, batch: int) -> None:
    options = dict(OPTIONS[name])
    if "mask" in options:
        options["mask"] = options["mask"][:batch]
    x = draw(batch, 9)
    compiled = torch.compile(projected, fullgraph=True, backend="aot_eager")
    got, expected = (output_and_gradient(function, x, options) for function in (compiled, projected))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_accepts_the_layouts() -> None:
    """Inductor checks the strides that the operator's fake promised, of outputs and of gradients."""
    x, options = draw(1, 9), OPTIONS["capped"]  # at batch 1 the heads' keys are a view, with strides of their own
    got, expected = (
        output_and_gradient(function, x, options) for function in (torch.compile(projected, fullgraph=True), projected)
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_one_dynamic_graph_serves_every_length() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(projected, fullgraph=True, backend=counter, dynamic=True)
    graphs = []
    for length in (9, 17, 33, 70):
        x = draw(2, length)
        got, expected = (output_and_gradient(f, x, OPTIONS["capped"]) for f in (compiled, projected))
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        graphs.append(counter.frame_count)
    assert set(graphs) == {graphs[0]}
