"""The kernels compile for every CPU, and a failure is reported and remembered."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest
import torch

from hf_qknorm.files import cache_folder
from hf_qknorm.ops.cpu import build
from qknorm_tests.cpu_cases import forget_the_build

COMPILER = """#!/bin/sh
echo "$@" >> {calls}
case "$*" in *--version*) echo "{version}"; exit 0;; esac
{rest}
"""
# A library that is larger than a page, from no objects
SMALL = """case "$*" in *" -c "*) exit 0;; esac
while [ "$1" != -o ]; do shift; done
echo 'int filling[9999] = {1};' | c++ -shared -fPIC -x c++ - -o "$2"
"""
OTHER_USER = 12345


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of its own, and nothing known yet in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget_the_build()
    yield tmp_path
    monkeypatch.undo()
    forget_the_build()


def use_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, rest: str, version: str = "1") -> Path:
    """Make CXX a script; returns the file that lists its calls."""
    script, calls = folder / f"compiler{version}", folder / "calls"
    script.write_text(COMPILER.format(calls=calls, version=version, rest=rest))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    forget_the_build()
    return calls


def use_small_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_compiler(folder, monkeypatch, SMALL)


def compilations(calls: Path) -> int:
    first = max(build.SOURCES.glob("*.cpp"), key=lambda file: file.stat().st_size)
    return sum(str(first) in line for line in calls.read_text().splitlines())


def test_a_failure_is_remembered_until_its_report_is_deleted(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_compiler(fresh, monkeypatch, "echo a line >&2; echo an error of the code >&2; echo more >&2; exit 3")
    assert build.why_unavailable() is None  # it did not compile to find out
    report = build._report()
    for _ in range(2):
        forget_the_build()
        reason = str(build.why_not_built())
        assert f"failed with status 3: an error of the code. The whole report is in {report}" in reason
        assert "\n" not in reason
        assert "more" in report.read_text()
        assert build.why_unavailable() == reason
    assert compilations(calls) == 1
    with pytest.raises(RuntimeError, match="not available: .*status 3"):
        build.operators()
    use_compiler(fresh, monkeypatch, "echo 'another error' >&2; exit 4", version="2")
    assert "another error" in str(build.why_not_built())  # another compiler is another attempt
    report.unlink()
    use_small_library(fresh, monkeypatch)
    assert build.why_not_built() is None
    assert compilations(calls) == 3


@pytest.mark.parametrize("fault", ["kill -9 $$", "echo fatal error: No space left on device >&2; exit 1"])
def test_a_killed_build_is_tried_again(fault: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(fresh, monkeypatch, fault)
    assert "failed with status" in str(build.why_not_built())
    calls = use_small_library(fresh, monkeypatch)
    assert build.why_not_built() is None
    assert compilations(calls) == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("starting", [True, False], ids=["compiler starts", "compiler runs"])
def test_a_forked_process_does_not_wait_for_a_thread_that_it_lacks(
    starting: bool, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, execute = Event(), subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def wait_and_execute(*arguments: Any) -> None:
        begun.set()
        sleep(0.2)  # the pipes are open
        execute(*arguments)

    calls = use_compiler(fresh, monkeypatch, f"sleep 0.2\n{SMALL}")
    assert build.name()
    monkeypatch.setattr(subprocess.Popen, "_execute_child", wait_and_execute)
    assert build.why_not_built(wait=False) == build.COMPILING
    assert not starting or begun.wait(timeout=10)
    child = os.fork()
    if not child:
        os._exit(build.why_not_built() is not None)
    assert os.waitpid(child, 0)[1] == 0
    assert build.why_not_built() is None
    assert compilations(calls) == 1


@pytest.mark.slow
def test_a_process_that_ends_leaves_a_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_compiler(fresh, monkeypatch, f"sleep 0.2\n{SMALL}")
    code = "from hf_qknorm.ops.cpu import build; assert build.why_not_built(wait=False) == build.COMPILING"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert build.why_not_ready() is None
    assert compilations(calls) == 1


def test_threads_compile_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_small_library(fresh, monkeypatch)
    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(lambda _: build._load.__wrapped__(), range(3))] == [None] * 3
    assert compilations(calls) == 1


def test_no_compiler_is_a_reason(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(fresh / "absent"))
    forget_the_build()
    assert "CXX names" in str(build.why_unavailable())
    assert build.why_not_built() == build.why_unavailable()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(fresh))
    forget_the_build()
    assert "no C++ compiler was found: install one of c++" in str(build.why_unavailable())
    assert build.why_not_built() == build.why_unavailable()
    assert not caplog.records  # many machines have none


@pytest.mark.costly
@pytest.mark.parametrize(("capability", "bf16"), [("AVX2", True), ("AVX512", False), ("AVX512", True)])
def test_the_sources_compile_for_every_cpu(
    capability: str, bf16: bool, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's headers differ between vectors, and a machine compiles for its own alone."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": bf16})
    assert ("-mavx512bf16" in build._flags()) == (capability == "AVX512" and bf16)
    subprocess.run(build._command("-fsyntax-only", str(build.SOURCES / "backward.cpp")), check=True)


@pytest.mark.parametrize(("owner", "name"), [(torch.backends.cpu, "get_cpu_capability"), (platform, "system")])
def test_other_machines_are_a_reason(owner: object, name: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, lambda: "other")
    forget_the_build()
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


def flip(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def move_behind_a_link(library: Path) -> None:
    library.symlink_to(library.rename(library.with_name("elsewhere")))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda library: os.truncate(library, 5000),
    "a bit flipped": flip,
    "empty": lambda library: library.write_bytes(b""),
    "a record of another": lambda library: library.with_suffix(".sha256").write_text("9 abc\n"),
    "no record": lambda library: library.with_suffix(".sha256").unlink(),
    "no text as record": lambda library: library.with_suffix(".sha256").write_bytes(b"\xff"),
    "a link": move_behind_a_link,
    "writable by others": lambda library: library.chmod(0o646),
    "a record writable by others": lambda library: library.with_suffix(".sha256").chmod(0o664),
    "of another user": lambda library: os.chown(library, OTHER_USER, -1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_library_that_is_not_as_it_was_compiled_is_compiled_again(
    damage: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To load the truncated one would end this process."""
    if damage == "of another user" and os.geteuid() != 0:
        pytest.skip("needs root")
    calls = use_small_library(fresh, monkeypatch)
    assert build.why_not_built() is None
    library = build._library()
    DAMAGES[damage](library)
    forget_the_build()
    assert "not compiled yet" in str(build.why_not_ready())
    assert compilations(calls) == 1
    caplog.clear()
    for _ in range(2):
        assert build.why_not_built() is None
        assert build.why_not_ready() is None
        assert compilations(calls) == 2
        forget_the_build()
    first, second, third = (record.getMessage() for record in caplog.records)
    assert str(library.with_suffix("")) in first
    assert first.endswith("The library is compiled again")
    assert second.startswith("Compiling")
    assert third.endswith("are compiled")
    assert not library.is_symlink()


def test_folder_and_files_are_of_this_user_alone(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_library(fresh, monkeypatch)
    old = os.umask(0)
    try:
        assert build.why_not_built() is None
    finally:
        os.umask(old)
    folder = build._library().parent
    modes = {file.suffix: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert modes[".so"] == modes[".sha256"] == 0o644
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700


def test_a_foreign_folder_is_a_reason(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = use_small_library(fresh, monkeypatch)
    assert build.why_not_built() is None
    folder = build._library().parent
    folder.chmod(0o777)
    forget_the_build()
    caplog.clear()
    reason = f"UntrustedError: {folder} has mode 0777, with which other users may write to it"
    assert str(build.why_unavailable()).startswith(reason)
    assert str(build.why_not_ready()).startswith(reason)
    assert str(build.why_not_built()).startswith(reason)
    assert f"run `chmod go-w {folder}`, or set XDG_CACHE_HOME" in caplog.text
    folder.chmod(0o755)  # as an earlier version made it
    forget_the_build()
    assert build.why_not_built() is None
    assert compilations(calls) == 1


def test_copies_of_the_sources_and_of_torch_share_a_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, report = build.name(), build._report()
    monkeypatch.setattr(build, "SOURCES", shutil.copytree(build.SOURCES, fresh / "copy" / "csrc"))
    monkeypatch.setattr(torch, "__file__", str(fresh / "torch" / "__init__.py"))
    forget_the_build()
    assert build.name() == name
    assert build._report() != report  # a torch without headers is no reason for another
    (build.SOURCES / "tiles.h").rename(build.SOURCES / "other.h")
    forget_the_build()
    assert build.name() != name


def test_libraries_that_nothing_uses_are_removed(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache_folder.make_folder()
    unused, used, mine = (f"hf_qknorm_cpu_{digit * 16}" for digit in "abc")
    names = [f"{stem}{end}" for stem in (unused, used, mine) for end in (".so", ".sha256", ".lock", ".12345678.txt")]
    for name in (*names, "hf_qknorm_cpu_notes.so", "mine.so"):
        (folder / name).touch()
        os.utime(folder / name, times=(0, 0))
    (folder / f"{used}.so").touch()  # as when it is loaded
    monkeypatch.setattr(build, "name", lambda: mine)
    use_compiler(fresh, monkeypatch, SMALL)
    monkeypatch.setattr(build, "_reported", lambda: None)
    assert build.why_not_built() is None
    left = {file.name for file in folder.iterdir()}
    gone = {name for name in names if unused in name} | {f"{mine}.12345678.txt"}
    assert left == {*names, "hf_qknorm_cpu_notes.so", "mine.so"} - gone
