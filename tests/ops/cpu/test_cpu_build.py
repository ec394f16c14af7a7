"""The kernels compile for every CPU, once, in the background, and a failure is reported."""

import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from hf_qknorm.ops.cpu import build
from qknorm_tests.children import child
from qknorm_tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("compiled")


# The first call of a process is in a graph, the second one is not.
FIRST_IN_A_GRAPH = """
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from hf_qknorm.attend.functions import best_attention as attend
x, counter = torch.ones(1, 2, 9, 16), CompileCounterWithBackend("eager")
compiled = torch.compile(attend, backend=counter, fullgraph=True)
for run in (compiled, attend, compiled):
    run(torch.nn.Module(), x, x, x, None)
print(counter.frame_count, counter.graphs[0].code)
"""


class Loader:
    """In place of `cpp_extension.load`: it makes a file, after `done` is set."""

    def __init__(self) -> None:
        self.calls, self.started, self.done = 0, Event(), Event()
        self.done.set()

    def __call__(self, name: str, sources: list[str], build_directory: str, **options: Any) -> None:
        self.calls += 1
        self.started.set()
        assert self.done.wait(timeout=60)
        (Path(build_directory) / f"{name}.so").touch()


def forget_the_build() -> None:
    """Forget what this process knows of compiler and library."""
    for function in (build._why_impossible, build._switch, build.name, build._library, build._loading):
        function.cache_clear()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of extensions of its own, and nothing known yet in this process."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv(build.SWITCH, raising=False)
    monkeypatch.setattr(build, "_overloads", {})
    monkeypatch.setattr(build, "_additions", [])
    forget_the_build()
    yield tmp_path
    monkeypatch.undo()
    forget_the_build()


@pytest.fixture
def loader(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Loader:
    loader = Loader()
    monkeypatch.setattr(cpp_extension, "load", loader)
    monkeypatch.setattr(build, "OPERATORS", ())
    return loader


def test_inference_does_not_wait_for_the_compiler(loader: Loader) -> None:
    loader.done.clear()
    assert [build.why_not(wait=False) for _ in range(3)] == [build.COMPILING] * 3
    loader.done.set()
    assert build.why_not() is None
    assert build.why_not(wait=False) is None
    assert loader.calls == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_lacks(loader: Loader) -> None:
    loader.done.clear()
    assert build.why_not(wait=False) == build.COMPILING
    assert loader.started.wait(timeout=60)
    child = os.fork()
    if not child:
        loader.done.set()
        os._exit(build._library().exists())  # the parent holds the lock: the child's own thread would wait for it
    assert os.waitpid(child, 0)[1] == 0
    child = os.fork()
    if not child:
        assert not build._loading.cache_info().currsize
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    loader.done.set()
    assert build.why_not() is None


def test_a_failure_is_a_reason_and_logged_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also beside the lock of a killed build: torch's own outlives its process, and is waited for without an end."""
    script = fresh / "compiler"
    script.write_text('#!/bin/sh\ncase "$*" in *version*) echo 12.2.0; exit 0;; esac\nexit 3\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    build._library().parent.mkdir(parents=True)
    (build._library().parent / "lock").touch()
    for _ in range(2):
        assert "Error building extension" in str(build.why_not())
    messages = [record.getMessage() for record in caplog.records if record.name == build.logger.name]
    assert len(messages) == 2
    assert "Compiling" in messages[0]
    assert "are not available" in messages[1]
    with pytest.raises(RuntimeError, match="not available: .*Error building"):
        build.overload("forward")
    monkeypatch.setattr(build, "_switch", lambda: "1")
    with pytest.raises(RuntimeError, match="HF_QKNORM_CPU=1 demands"):
        build.why_not()


def test_no_compiler_is_a_reason(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(fresh / "absent"))
    assert "no C++ compiler" in str(build.why_not())
    assert str(fresh / "absent") in str(build.why_not())
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(fresh))
    forget_the_build()
    assert "no C++ compiler 'c++': install one" in str(build.why_not())
    assert not caplog.records  # many machines have none


@pytest.mark.costly
@pytest.mark.parametrize(
    ("capability", "bf16"), slow_but([("AVX2", True)], [("AVX2", True), ("AVX512", False), ("AVX512", True)])
)
def test_the_sources_compile_for_every_cpu(
    capability: str, bf16: bool, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's headers differ between vectors, and a machine compiles for its own alone."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": bf16})
    assert ("-mavx512bf16" in build._flags()) == (capability == "AVX512" and bf16)
    included = [argument for path in cpp_extension.include_paths("cpu") for argument in ("-isystem", path)]
    command = [cpp_extension.get_cxx_compiler(), *build._flags(), *included, "-fsyntax-only"]
    subprocess.run([*command, str(build.SOURCES / "backward.cpp")], check=True)


def test_other_machines_and_folders_are_a_reason(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for owner, name in ((torch.backends.cpu, "get_cpu_capability"), (platform, "system")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda: "other")
            forget_the_build()
            assert "other" in str(build.why_not())
    forget_the_build()
    (fresh / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(fresh / "file"))
    assert "NotADirectoryError" in str(build.why_not())
    (record,) = caplog.records
    assert "are not available: NotADirectoryError" in record.getMessage()


@pytest.mark.costly
def test_a_graph_has_the_kernels_of_an_earlier_process(tmp_path: Path) -> None:
    """It has no break, and is not compiled again after a call outside of it."""
    count, _, code = child(FIRST_IN_A_GRAPH, home=tmp_path).partition(" ")
    assert count == "1"
    assert build.name() in code


def test_each_version_of_sources_and_torch_has_a_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [build.name()]
    for owner, name, value in (
        (torch, "__version__", "9.9"),
        (torch, "__file__", "another/__init__.py"),
        (build, "SOURCES", fresh),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            forget_the_build()
            names.append(build.name())
    assert len({*names}) == len(names)
