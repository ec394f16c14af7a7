"""Which implementation "hf_qknorm" takes, in which order, and what it logs."""

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_qknorm.attend import implementations
from hf_qknorm.attend.functions import REGISTERED
from hf_qknorm.attend.implementations import choose
from hf_qknorm.ops import library
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.types import Call
from qknorm_tests.operator_calls import call

Q = torch.zeros(1, 2, 9, 16)
MASK = torch.ones(1, 1, 9, 9, dtype=torch.bool)
ARBITRARY = "tiled in PyTorch: the mask [1, 1, 9, 9] is an arbitrary one"


def chosen(q: Tensor = Q, **options: Any) -> str:
    return str(choose(Call(*call(q, q, q, **options))))


def test_the_order_on_a_gpu(monkeypatch, caplog):
    """Each choice is logged once, and not in a trace."""
    caplog.set_level(logging.INFO, "hf_qknorm")
    monkeypatch.setattr(implementations, "_logged", set())
    monkeypatch.setattr(implementations, "device_type", lambda x: "cuda")
    reason = None
    monkeypatch.setattr(library, "why_not_fused", lambda *heads: reason)
    with monkeypatch.context() as trace:
        trace.setattr(torch.compiler, "is_compiling", lambda: True)
        chosen()
    assert not caplog.records
    for _ in range(2):
        assert chosen() == "its Triton kernels"
        assert chosen(mask=MASK).startswith(ARBITRARY)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "hf_qknorm attention runs its Triton kernels"
    assert second.startswith("hf_qknorm attention runs tiled in PyTorch: the mask")
    reason = "capability 7.5"
    assert chosen() == "tiled in PyTorch: capability 7.5"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("demanded", [False, True])
def test_the_order_on_a_cpu(demanded, monkeypatch):
    """To demand the C++ kernels is to demand that they can run, not that they take each call."""
    monkeypatch.setattr(build, "_switch", lambda: "1" if demanded else None)
    assert chosen() == "its C++ kernels"
    assert chosen(mask=MASK).startswith(ARBITRARY)
    assert chosen(Q.double()).startswith("tiled in PyTorch: the C++ kernels take float32")
    assert chosen(Q.to("meta")).startswith("tiled in PyTorch: the kernels are for NVIDIA GPUs and CPUs")


@pytest.fixture
def _read_anew():
    """The switch is read once: forget it, before and after."""
    build._switch.cache_clear()
    yield
    build._switch.cache_clear()


@pytest.mark.usefixtures("_read_anew")
def test_the_switch_of_the_cpp_kernels(monkeypatch):
    for value in ("2", "yes"):
        monkeypatch.setenv(build.SWITCH, value)
        with pytest.raises(ValueError, match=f"HF_QKNORM_CPU must be 1 .* or 0 .*, got {value!r}"):
            chosen()
    monkeypatch.setenv(build.SWITCH, "0")
    assert chosen() == "tiled in PyTorch: HF_QKNORM_CPU=0 turns the C++ kernels off"
    with pytest.raises(ValueError, match=r'"hf_qknorm_cpu" can\'t serve this call: HF_QKNORM_CPU=0.*set_attn'):
        REGISTERED["hf_qknorm_cpu"](torch.nn.Module(), Q, Q, Q, None)


def test_without_a_compiler_tiled_runs_unless_the_cpp_kernels_are_demanded(monkeypatch):
    reason = "there is no C++ compiler"
    monkeypatch.setattr(build, "_overloads", {})
    monkeypatch.setattr(build, "_why_impossible", lambda: reason)
    monkeypatch.setattr(build, "_switch", lambda: None)
    assert chosen() == f"tiled in PyTorch: {reason}"
    monkeypatch.setattr(build, "_switch", lambda: "1")
    with pytest.raises(RuntimeError, match=f"HF_QKNORM_CPU=1 demands.*{re.escape(reason)}.*unset HF_QKNORM_CPU"):
        chosen()


class Attention(torch.nn.Module):
    def forward(self, q: Tensor, dropout: float = 0.0) -> Tensor:
        call_ = Call(*call(q, q, q, softcap=5.0, causal=True, dropout=dropout))
        return choose(call_).implementation.run(call_)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_compiled_graph_with_symbols_has_the_cpp_operators(dropout):
    graphs: list[set[str]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets = [str(node.target) for node in graph.graph.nodes]
        graphs.append({target.split(".")[0] for target in targets if "hf_qknorm" in target})
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(Attention(), fullgraph=True, dynamic=True, backend=backend)
    for length in (9, 14):
        q, found = torch.randn(1, 2, length, 16), []
        for attention in (compiled, Attention()):
            torch.manual_seed(0)
            found.append(attention(q, dropout))
        torch.testing.assert_close(*found)
    assert graphs == [{build.name()}]
    if not dropout:
        q, found = torch.randn(1, 9, 2, 16).transpose(1, 2).requires_grad_(), []
        for attention in (torch.compile(Attention(), fullgraph=True, backend="aot_eager"), Attention()):
            out = attention(q)
            found += [(out, torch.autograd.grad(out.sin().sum(), q))]
        torch.testing.assert_close(*found)
