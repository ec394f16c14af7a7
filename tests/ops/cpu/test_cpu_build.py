"""The kernels compile for every CPU, and a failure is reported and remembered."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_qknorm.ops.cpu import build

CACHED = (build._why_impossible, build._compiler, build._command, build._digest, build.name, build._load)
COMPILER = """#!/bin/sh
echo "$@" >> {calls}
case "$*" in *--version*) echo "{version}"; exit 0;; esac
{rest}
"""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of its own, and nothing known yet in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def forget() -> None:
    for function in CACHED:
        function.cache_clear()


def use_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, rest: str, version: str = "1") -> Path:
    """Make CXX a script; returns the file that lists its calls."""
    script, calls = folder / f"compiler{version}", folder / "calls"
    script.write_text(COMPILER.format(calls=calls, version=version, rest=rest))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    forget()
    return calls


def compilations(calls: Path) -> int:
    return sum("--version" not in line for line in calls.read_text().splitlines())


def test_a_failure_is_reported_and_remembered(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_compiler(fresh, monkeypatch, "echo 'error: no such flag' >&2; exit 3")
    assert build.why_unavailable() is None  # it did not compile to find out
    for _ in range(2):
        forget()
        reason = build.why_not_built()
        assert reason is not None
        assert "failed with status 3" in reason
        assert "error: no such flag" in reason
        assert build.why_unavailable() == reason
    assert compilations(calls) == 1
    with pytest.raises(RuntimeError, match="not available: .*status 3"):
        build.operators()
    use_compiler(fresh, monkeypatch, "echo 'another error' >&2; exit 4", version="2")
    assert "another error" in str(build.why_not_built())  # another compiler is another attempt
    assert compilations(calls) == 2


def test_a_file_that_is_no_library_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(fresh, monkeypatch, 'while [ "$1" != -o ]; do shift; done; echo nothing > "$2"')
    assert "OSError" in str(build.why_not_built())


def test_no_compiler_is_a_reason(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(fresh / "absent"))
    forget()
    assert "CXX names" in str(build.why_unavailable())
    assert build.why_not_built() == build.why_unavailable()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(fresh))
    forget()
    assert "no C++ compiler was found: install one of c++" in str(build.why_unavailable())
    assert build.why_not_built() == build.why_unavailable()
    assert not caplog.records  # many machines have none


def test_the_variable_may_hold_arguments(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_compiler(fresh, monkeypatch, "echo 'error: no such flag' >&2; exit 3")
    monkeypatch.setenv("CXX", f"{build._compiler()[0]} -B folder")
    forget()
    assert "failed with status 3" in str(build.why_not_built())
    assert [line.startswith("-B folder ") for line in calls.read_text().splitlines()] == [True, True]


@pytest.mark.parametrize("capability", build.VECTORS)
def test_the_sources_compile_for_every_cpu(capability: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's headers differ between vectors, and a machine compiles for its own alone."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    flags = [part for part in build._command() if not part.endswith(".cpp")]
    subprocess.run([*flags, "-fsyntax-only", str(build.SOURCES / "backward.cpp")], check=True)


@pytest.mark.parametrize(("owner", "name"), [(torch.backends.cpu, "get_cpu_capability"), (platform, "system")])
def test_other_machines_are_a_reason(owner: object, name: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, lambda: "other")
    forget()
    assert "other" in str(build.why_unavailable())


def test_a_folder_that_cannot_be_written_is_a_reason(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (fresh / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    use_compiler(fresh, monkeypatch, "exit 0")
    assert "NotADirectoryError" in str(build.why_not_built())
    (record,) = caplog.records
    assert "are not available: NotADirectoryError" in record.getMessage()
