"""`library.attention` under torch.compile: one opaque node, no graph break, no recompilation for each length."""

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hf_qknorm.ops import library
from hf_qknorm.ops.types import Heads, Options, Visible
from qknorm_tests.attention_cases import Case, problem

pytestmark = [
    pytest.mark.costly,
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),  # torch's own
]
CAPPED = Case(queries=9, causal=True, softcap=5.0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Disable the compilers' caches: their keys do not include the operator's fake."""
    torch._dynamo.reset()
    inductor, functorch = torch._inductor.config, torch._functorch.config
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield


def projected(x: Tensor, visible: Visible, options: Options) -> Tensor:
    """Split and join heads by transposed views, as a model does around attention."""
    q = x.unflatten(-1, (4, 16)).transpose(1, 2) * 2
    return library.attention(Heads(q, q[:, ::2], q[:, 1::2]), visible, options).transpose(1, 2).flatten(2).sin()


def assert_same(compiled: Callable[..., Tensor], case: Case, batch: int, tolerance: float = 1e-6) -> None:
    given, found = problem(case, torch.float32), []
    x = torch.randn(batch, case.queries, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = None if given.visible.mask is None else given.visible.mask[:batch]
    for function in (compiled, projected):
        torch.manual_seed(0)
        out = function(x, given.visible._replace(mask=mask, seed=None), given.options)
        found.append((out.detach(), torch.autograd.grad(out.sum(), x)[0]))
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("case", "batch"),
    [
        (CAPPED, 1),
        (Case(queries=9, causal=True, window=4, sinks=True), 2),
        (Case(queries=9, softcap=5.0, mask="bool:B1TS"), 1),
        (Case(queries=9, dropout=0.25), 2),
    ],
    ids=str,
)
def test_the_compiled_function_is_the_plain_one(case: Case, batch: int) -> None:
    assert_same(torch.compile(projected, fullgraph=True, backend="aot_eager"), case, batch)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("fallback", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_inductor_accepts_the_layouts(fallback: bool) -> None:
    """It checks the strides that the operator's fake promised; at batch 1 the keys are a view with its own.

    With `fallback` all other operators are torch's, and no C++ is compiled.
    """
    with torch._inductor.config.patch(fallback_by_default=fallback):
        assert_same(torch.compile(projected, fullgraph=True), CAPPED, 1, 1e-5)


def test_one_dynamic_graph_serves_every_length() -> None:
    counter, graphs = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(projected, fullgraph=True, backend=counter, dynamic=True)
    for length in (9, 17, 33, 70):
        assert_same(compiled, Case(queries=length, causal=True, softcap=5.0), 2)
        graphs.append(counter.frame_count)
    assert set(graphs) == {graphs[0]}
