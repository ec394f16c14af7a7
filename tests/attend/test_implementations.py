"""Which implementation "hf_qknorm" takes, in which order, and that each computes the same in a model."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from hf_qknorm import SCHEMES, patch_model
from hf_qknorm.attend import implementations
from hf_qknorm.attend.functions import REGISTERED
from hf_qknorm.attend.implementations import CPP, IMPLEMENTATIONS, TRITON, choose
from hf_qknorm.families.style import CACHE
from hf_qknorm.ops import library
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.types import Call
from qknorm_tests.operator_calls import call
from qknorm_tests.tables import assert_near, make_batch, randomise, sharp_model

Q = torch.zeros(1, 2, 9, 16)
MASK = torch.ones(1, 1, 9, 9, dtype=torch.bool)


def chosen(*heads: Tensor, **options: Any) -> implementations.Choice:
    return choose(Call(*call(*heads, **options)))


@pytest.fixture(autouse=True)
def unlogged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "_logged", set())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a GPU: kernels run in the interpreter."""
    monkeypatch.setattr(implementations, "device_type", lambda x: "cuda")


@pytest.mark.parametrize(
    ("reason", "options", "expected"),
    [
        (None, {}, "its Triton kernels"),
        ("capability 7.5", {}, "tiled in PyTorch: capability 7.5"),
        (None, {"mask": MASK}, "tiled in PyTorch: the mask [1, 1, 9, 9] is an arbitrary one"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_the_order_on_a_gpu(reason, options, expected, monkeypatch):
    monkeypatch.setattr(library, "why_not_fused", lambda *heads: reason)
    assert str(chosen(Q, Q, Q, **options)).startswith(expected)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("heads", "options", "expected"),
    [
        (Q, {}, "its C++ kernels"),
        (Q, {"mask": MASK}, "tiled in PyTorch: the mask [1, 1, 9, 9] is an arbitrary one"),
        (Q.double(), {}, "tiled in PyTorch: the C++ kernels take float32"),
        (Q.to("meta"), {}, "tiled in PyTorch: the kernels are for NVIDIA GPUs and CPUs"),
    ],
    ids=["plain", "mask", "fp64", "meta"],
)
@pytest.mark.parametrize("demanded", [False, True])
def test_the_order_on_a_cpu(heads, options, expected, demanded, monkeypatch):
    """To demand the C++ kernels is to demand that they can run, not that they take each call."""
    monkeypatch.setenv(build.SWITCH, "1") if demanded else monkeypatch.delenv(build.SWITCH, raising=False)
    assert str(chosen(heads, heads, heads, **options)).startswith(expected)


def test_the_switch_turns_the_cpp_kernels_off(monkeypatch):
    monkeypatch.setenv(build.SWITCH, "0")
    assert str(chosen(Q, Q, Q)) == "tiled in PyTorch: HF_QKNORM_CPU=0 turns the C++ kernels off"
    with pytest.raises(ValueError, match=r'"hf_qknorm_cpu" can\'t serve this call: HF_QKNORM_CPU=0.*set_attn'):
        REGISTERED["hf_qknorm_cpu"](torch.nn.Module(), Q, Q, Q, None)


@pytest.mark.parametrize("value", ["2", "yes"])
def test_another_value_of_the_switch_is_refused(value, monkeypatch):
    monkeypatch.setenv(build.SWITCH, value)
    with pytest.raises(ValueError, match=f"HF_QKNORM_CPU must be 1 .* or 0 .*, got {value!r}"):
        chosen(Q, Q, Q)


def test_without_a_compiler_tiled_runs_unless_the_cpp_kernels_are_demanded(monkeypatch):
    reason = "there is no C++ compiler"
    monkeypatch.setattr(build, "_overloads", {})
    monkeypatch.setattr(build, "_why_impossible", lambda: reason)
    monkeypatch.delenv(build.SWITCH, raising=False)
    assert str(chosen(Q, Q, Q)) == f"tiled in PyTorch: {reason}"
    monkeypatch.setenv(build.SWITCH, "1")
    with pytest.raises(RuntimeError, match=f"HF_QKNORM_CPU=1 demands.*{re.escape(reason)}.*unset HF_QKNORM_CPU"):
        chosen(Q, Q, Q)


@pytest.mark.usefixtures("gpu")
def test_the_implementation_is_logged_once_and_not_in_a_trace(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "hf_qknorm")
    monkeypatch.setattr(library, "why_not_fused", lambda *heads: None)
    with monkeypatch.context() as trace:
        trace.setattr(torch.compiler, "is_compiling", lambda: True)
        chosen(Q, Q, Q)
    assert not caplog.records
    for rows in (1, 9):
        chosen(Q, Q, Q)
        chosen(Q, Q, Q, mask=torch.ones(1, 1, rows, 9, dtype=torch.bool))
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "hf_qknorm attention runs its Triton kernels"
    assert second.startswith("hf_qknorm attention runs tiled in PyTorch: the mask")


class Attention(torch.nn.Module):
    def forward(self, q: Tensor, dropout: float = 0.0) -> Tensor:
        call_ = Call(*call(q, q, q, softcap=5.0, causal=True, dropout=dropout))
        return choose(call_).implementation.run(call_)


def operators_of(graph: torch.fx.GraphModule) -> set[str]:
    return {str(node.target).split(".")[0] for node in graph.graph.nodes if "hf_qknorm" in str(node.target)}


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_compiled_graph_with_symbols_has_the_cpp_operators(dropout):
    graphs: list[set[str]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(operators_of(graph))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(Attention(), fullgraph=True, dynamic=True, backend=backend)
    for length in (9, 14):
        q = torch.randn(1, 2, length, 16)
        torch.manual_seed(0)
        got = compiled(q, dropout)
        torch.manual_seed(0)
        torch.testing.assert_close(got, Attention()(q, dropout))
    assert graphs == [{build.name()}]
    if not dropout:
        q, found = torch.randn(1, 9, 2, 16).transpose(1, 2).requires_grad_(), []
        for attention in (torch.compile(Attention(), fullgraph=True, backend="aot_eager"), Attention()):
            out = attention(q)
            found += [(out, torch.autograd.grad(out.sin().sum(), q))]
        torch.testing.assert_close(*found)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return randomise(patch_model(sharp_model("llama", num_hidden_layers=1), SCHEMES["qk_norm_cap"]))


def outcome(model: PreTrainedModel, backend: str) -> dict[str, Tensor]:
    """A training step; a prompt and a token with a dynamic and a static cache; a token with gradients over a prompt."""
    model.set_attn_implementation(backend)
    model.zero_grad()
    result = model(**make_batch("left"), use_cache=False)
    result.loss.backward()
    found = {"loss": result.loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
    tokens = make_batch("plain")["input_ids"][:, :9]
    with torch.no_grad():
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=16)):
            for i, piece in enumerate(tokens.split([8, 1], dim=1)):
                found[f"{type(cache).__name__} {i}"] = model(input_ids=piece, **{CACHE: cache}).logits
        cache = model(input_ids=tokens[:, :8])[CACHE]
    found["with gradients"] = model(input_ids=tokens[:, 8:], **{CACHE: cache}).logits.detach()
    return found


@pytest.mark.costly
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda x: x.name)
def test_each_implementation_computes_the_same(implementation, model, request):
    if implementation is TRITON:
        pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
        from qknorm_tests import interpreter

        interpreter.install()
    if implementation is CPP:
        request.getfixturevalue("compiled")
    expected = outcome(model, "hf_qknorm_eager")
    for name, value in outcome(model, implementation.name).items():
        assert_near(value, expected[name], 1e-4, name)
