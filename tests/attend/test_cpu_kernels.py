"""When the C++ kernels serve a call, and when they are compiled."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_qknorm import doctor
from hf_qknorm.attend import cpu_kernels, implementations
from hf_qknorm.attend.functions import REGISTERED
from hf_qknorm.attend.implementations import CPP, TILED, Choice
from hf_qknorm.ops.cpu import attention, build, library_file
from hf_qknorm.ops.error_budget import Verdict
from hf_qknorm.ops.trust import first_use, self_check
from hf_qknorm.ops.types import Call
from qknorm_tests.cpu_cases import forget_the_build
from qknorm_tests.operator_calls import call

pytestmark = pytest.mark.usefixtures("compiled")
LAYER = torch.nn.Module()
LAYER.config = SimpleNamespace(_attn_implementation="hf_qknorm_cpu")
Q = torch.zeros(1, 2, 9, 16)
MASK = torch.ones(1, 1, 9, 9, dtype=torch.bool)


def choose(*heads: torch.Tensor, **options: Any) -> Choice:
    return implementations.choose(Call(*call(*heads, **options)))


NONE = "no C++ compiler was found"


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test is a new process, without the variable."""
    monkeypatch.delenv(cpu_kernels.SWITCH, raising=False)
    monkeypatch.setattr(first_use, "_reasons", {})
    monkeypatch.setattr(cpu_kernels, "_served", set())
    monkeypatch.setattr(first_use, "_absent", set())
    first_use._warned.cache_clear()
    forget_the_build()
    yield
    monkeypatch.undo()
    forget_the_build()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A machine without a library. Its linker copies that of this machine, and leaves a line in `calls`."""
    real = build._library()
    build.overload("attend")  # the real operator stands for the copy's
    calls, fault, compiler = tmp_path / "calls", tmp_path / "fault", tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in --version) echo 1; exit;; *" -c "*) exit;; esac\necho x >> {calls}\nsleep 0.2\n'
        f'if [ -f {fault} ]; then . {fault}; fi\nwhile [ "$1" != -o ]; do shift; done\ncp {real} "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library_file, "CDLL", lambda path: Path(path).stat())
    forget_the_build()
    yield SimpleNamespace(fault=fault, count=lambda: len(calls.read_text()) // 2 if calls.exists() else 0)
    if build._compilation.cache_info().currsize:  # a test that failed leaves it at work, which would write outside
        build._compilation().exception()


def test_a_cpu_takes_them():
    chosen = choose(Q, Q, Q)
    assert str(chosen) == "its C++ kernels"
    assert chosen.implementation is CPP


@pytest.mark.parametrize("value", [None, "1"])
@pytest.mark.parametrize(("heads", "options"), [(Q, {"mask": MASK}), (Q.double(), {})], ids=["mask", "fp64"])
def test_calls_that_they_do_not_take_are_tiled(value, heads, options, monkeypatch):
    if value is not None:
        monkeypatch.setenv(cpu_kernels.SWITCH, value)
    assert choose(heads, heads, heads, **options).implementation is TILED


def test_the_switch_turns_them_off(monkeypatch):
    monkeypatch.setenv(cpu_kernels.SWITCH, "0")
    chosen = choose(Q, Q, Q)
    assert chosen.implementation is TILED
    assert "HF_QKNORM_CPU=0" in str(chosen)
    with pytest.raises(ValueError, match=r'"hf_qknorm_cpu" can\'t serve this call: HF_QKNORM_CPU=0.*set_attn'):
        REGISTERED["hf_qknorm_cpu"](LAYER, Q, Q, Q, None)


@pytest.mark.parametrize("value", ["", "2", "yes"])
def test_another_value_of_the_switch_is_refused(value, monkeypatch):
    monkeypatch.setenv(cpu_kernels.SWITCH, value)
    with pytest.raises(ValueError, match=f"HF_QKNORM_CPU must be 1 .* or 0 .*, got {value!r}"):
        choose(Q, Q, Q)


def test_without_a_compiler_tiled_runs_unless_they_are_demanded(monkeypatch):
    monkeypatch.setenv("CXX", "/no/compiler")
    forget_the_build()
    chosen = choose(Q, Q, Q)
    assert chosen.implementation is TILED
    assert NONE in str(chosen)
    found = {finding.topic: finding for finding in doctor._attention(torch.device("cpu"))}
    assert found["hf_qknorm_cpu"].level == "note"
    assert NONE in found["hf_qknorm"].text
    monkeypatch.setenv(cpu_kernels.SWITCH, "1")
    with pytest.raises(RuntimeError, match=f"HF_QKNORM_CPU=1 demands.*{re.escape(NONE)}.*CXX.*unset HF_QKNORM_CPU"):
        choose(Q, Q, Q)
    (problem,) = doctor._attention(torch.device("cpu"))
    assert problem.level == "problem"


def test_a_failed_check_warns_with_figures_and_takes_tiled(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(first_use.verdict_files, "read", lambda *_: None)
    monkeypatch.setattr(first_use.verdict_files, "write", lambda *_: None)
    monkeypatch.setattr(self_check, "check", lambda *_: self_check.Finding("output", Verdict(0.05, 0.002)))
    assert choose(Q, Q, Q).implementation is TILED
    (record,) = caplog.records
    for part in ("the output has a relative error of 5.0e-02, and 2.0e-03 is allowed", '"hf_qknorm_cpu" refuses'):
        assert part in record.getMessage()
    with pytest.raises(ValueError, match="hf_qknorm_cpu.*5.0e-02"):
        REGISTERED["hf_qknorm_cpu"](LAYER, Q, Q, Q, None)
    monkeypatch.setenv(cpu_kernels.SWITCH, "1")
    with pytest.raises(RuntimeError, match="demands.*5.0e-02"):
        choose(Q, Q, Q)


def test_a_call_before_any_check_is_checked_later(monkeypatch):
    monkeypatch.setattr(first_use.verdict_files, "read", lambda *_: None)
    monkeypatch.setattr(first_use.verdict_files, "write", lambda *_: None)
    monkeypatch.setattr(self_check, "check", lambda *_: self_check.Finding("output", Verdict(0.05, 0.002)))
    with monkeypatch.context() as patched:
        patched.setattr(first_use, "_can_check", lambda _: False)  # as in a backward pass
        assert choose(Q, Q, Q).implementation is CPP
    assert choose(Q, Q, Q).implementation is TILED


def test_the_check_finds_a_wrong_kernel(monkeypatch):
    """As of a compiler that breaks the code: each path is compared with the specification."""
    right = attention.attention
    path = first_use.CodePath.of(first_use.fields(*call(Q, Q, Q, softcap=5.0, dropout=0.3), "cpu"))
    assert self_check.check(path, torch.device("cpu")).verdict.passed
    monkeypatch.setattr(attention, "attention", lambda *given: right(*given) * 1.001)
    assert not self_check.check(path, torch.device("cpu")).verdict.passed


@pytest.mark.parametrize("group", [4, 5, 7, 9])
def test_sound_kernels_pass_the_check(group):
    """For these groups, a problem of one query has too few numbers for the budget's statistics."""
    path = first_use.CodePath("cpu", torch.float32, 16, group, True, causal=True)
    found = self_check.check(path, torch.device("cpu"))
    assert found.verdict.passed, found


@pytest.mark.parametrize("place", ["trace", "export", "daemon", "fake"])
def test_nothing_is_compiled_in(place, machine, monkeypatch):
    heads = Q
    if place in ("trace", "export"):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        monkeypatch.setattr(torch.compiler, "is_exporting", lambda: place == "export")
    elif place == "daemon":
        monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(daemon=True))
    else:
        heads = FakeTensorMode().from_tensor(Q)
    assert choose(heads, heads, heads).implementation is TILED
    assert machine.count() == 0


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        return implementations.run(Call(*call(q, q, q, softcap=5.0, causal=True, dropout=dropout)))


def test_an_exported_graph_has_none():
    found = torch.export.export(Attention(), (torch.randn(1, 2, 9, 16),))
    assert [str(node.target) for node in found.graph.nodes if "hf_qknorm" in str(node.target)] == [
        "hf_qknorm.attention.default"
    ]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_compiled_graph_with_symbols_has_them(dropout):
    """Every size and number is a symbol in it, and the key of a verdict is made of numbers."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.extend(str(node.target) for node in graph.graph.nodes if "hf_qknorm" in str(node.target))
        return graph.forward

    compiled = torch.compile(Attention(), fullgraph=True, dynamic=True, backend=backend)
    for length in (9, 14):
        q = torch.randn(1, 2, length, 16)
        torch.manual_seed(0)
        got = compiled(q, dropout)
        torch.manual_seed(0)
        torch.testing.assert_close(got, Attention()(q, dropout))
    assert graphs
    assert set(graphs) == {"hf_qknorm.cpu_attention.default"}


def test_inference_is_tiled_until_the_compiler_is_done(machine, caplog):
    with torch.no_grad():
        chosen = choose(Q, Q, Q)
        assert chosen.implementation is TILED
        assert build.COMPILING in str(chosen)
        assert build._compilation().result() is None
        assert choose(Q, Q, Q).implementation is CPP
    assert machine.count() == 1
    assert [record.getMessage() for record in caplog.records][1:] == ["The attention kernels for this CPU are compiled"]


@pytest.mark.parametrize("case", ["gradients", "dropout", "demanded", "by name"])
def test_other_calls_wait_for_it(case, machine, monkeypatch):
    """Under checkpointing a training step is computed twice, and both times must be the same implementation."""
    with torch.no_grad():
        assert choose(Q, Q, Q).implementation is TILED
    with torch.set_grad_enabled(case == "gradients"):
        if case == "demanded":
            monkeypatch.setenv(cpu_kernels.SWITCH, "1")
        if case == "by name":
            assert CPP.why_not(*call(Q, Q, Q)) is None
        else:
            assert choose(Q, Q, Q, dropout=0.5 if case == "dropout" else 0.0).implementation is CPP
    assert machine.count() == 1


def test_without_a_thread_tiled_runs(machine, monkeypatch, caplog):
    monkeypatch.setattr(build.ThreadPoolExecutor, "submit", lambda *_: _raise(RuntimeError("can't start new thread")))
    with torch.no_grad():
        assert choose(Q, Q, Q).implementation is TILED
    assert "not available: RuntimeError: can't start new thread" in caplog.text


def _raise(error: Exception) -> None:
    raise error
