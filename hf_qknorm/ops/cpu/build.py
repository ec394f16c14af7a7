"""The C++ kernels: compiled once on a machine, in a thread that begins at their first use, and loaded.

The library is stored in `files.cache_folder`. Its name has a digest of its inputs: the sources, the
flags, the versions of compiler, torch and C library, and the CPU's vector instructions. Places are no part of it:
copies of the same sources share a library, as do copies of the same torch. One process compiles while others wait at a
lock. The finished library is renamed into its place, so that no process loads a part of it. A library that was damaged
later is compiled again (`library_file`).

The report of a compiler that fails is stored under the same name, with a digest of the command. Later processes read
the reason there, and compile again only when one of the digests has changed. A compiler that was killed, or had too
little memory or disk space, leaves no report: the next process tries again.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from typing import Any, Final

import torch
from filelock import FileLock

from hf_qknorm.files.cache_folder import folder, make_folder, open_file, remove_unused, store_text
from hf_qknorm.ops.cpu import library_file
from hf_qknorm.ops.traces import constant_in_traces

logger = logging.getLogger(__name__)

SOURCES: Final = Path(__file__).parent / "csrc"
# As torch's own kernels are compiled for these CPUs
VECTORS: Final = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
}
MOST_COMPILERS: Final = 4  # at once, each with up to a gigabyte of memory
COMPILERS: Final = ("c++", "g++", "clang++")
# In messages of a compiler that was killed, or had too little memory or disk space
_TEMPORARY: Final = ("No space left", "Cannot allocate memory", "out of memory", "Killed", "terminated")
_PREFIX: Final = "hf_qknorm_cpu_"
_FILES: Final = re.compile(_PREFIX + r"[0-9a-f]{16}(?=\.)")  # of a library, a lock and a report too
_LONGEST: Final = 2**16  # bytes of a reason
COMPILING: Final = "the C++ kernels are being compiled"


def why_unavailable() -> str | None:
    """The reason why the kernels can't run on this machine, or None; it is cheap, and compiles nothing.

    A failure to compile is known once it has happened: see `why_not_built`.
    """
    reason = _why_impossible()
    if reason is not None:
        return reason
    try:
        return _reported()
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def why_not_ready() -> str | None:
    """The reason why the kernels can't be called at once, or None; compiles nothing."""
    if _load.cache_info().currsize:
        return _load()
    reason = why_unavailable()
    if reason is None and library_file.why_unsound(_library()):
        return "the C++ kernels are not compiled yet, which happens in the first call outside of traces and workers"
    return reason or why_not_built()


@constant_in_traces
def why_not_built(wait: bool = True) -> str | None:
    """The reason why the kernels are not there after an attempt to compile them, or None.

    The first call on a machine compiles them, in about a minute; the first call in a process loads them. A call
    that does not `wait` returns a reason, `COMPILING`, until the compiler is done.
    """
    return _load() if wait or not _is_compiling() else COMPILING


def is_loaded() -> bool:
    """Whether this process has loaded the kernels."""
    return _load.cache_info().currsize > 0 and _load() is None


def operators() -> Any:
    """The compiled operators. Raises RuntimeError, with the reason, if they are not there."""
    reason = why_not_built()
    if reason is not None:
        raise RuntimeError(f"the C++ kernels for the CPU are not available: {reason}")
    return getattr(torch.ops, name())


@cache
def overload(name: str) -> Any:
    """The only overload of a compiled operator: to look it up takes a part of a call's time."""
    return getattr(operators(), name).default


@cache
def _why_impossible() -> str | None:
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.system() != "Linux":
        return f"the C++ kernels are for Linux, and this is {platform.system() or 'an unknown system'}"
    if capability not in VECTORS:
        return f"the C++ kernels need AVX2 or AVX-512, and torch reports {capability} for this CPU"
    if not _compiler():
        if wanted := os.environ.get("CXX"):
            return f"no C++ compiler was found: the variable CXX names {wanted!r}, which is no program of this machine"
        return f"no C++ compiler was found: install one of {', '.join(COMPILERS)}, or name it in the variable CXX"
    return None


@cache
def _compiler() -> list[str]:
    """The compiler's program and its own arguments, as of CXX="ccache g++"; empty without one."""
    wanted = os.environ.get("CXX", "").split()
    found = next(filter(None, map(shutil.which, wanted[:1] or COMPILERS)), None)
    return [] if found is None else [found, *wanted[1:]]


@cache
def _flags() -> list[str]:
    """The part of the command that decides on the library, wherever the sources and torch lie."""
    capability = torch.backends.cpu.get_cpu_capability()
    bf16 = ["-mavx512bf16"] if capability == "AVX512" and torch.cpu.get_capabilities()["avx512_bf16"] else []
    return [
        *("-std=c++20", "-O3", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden", "-w"),
        "-ffp-contract=off",  # products and sums are fused where the code says so, and alike in all passes
        *(*VECTORS[capability], *bf16, f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"),
        *("-ltorch_cpu", "-lc10"),  # OpenMP, libgomp.so.1, is the one that torch has loaded, by its name
    ]


def _command(*files: str) -> list[str]:
    """The command, with its inputs and the option that names its output."""
    root = Path(torch.__file__).parent
    places = ("-isystem", str(root / "include"), f"-L{root / 'lib'}", f"-ffile-prefix-map={SOURCES}=csrc")
    return [*_compiler(), *places, f"-DHF_QKNORM_LIBRARY={name()}", *files, *_flags()]


@cache
def _digest() -> str:
    with _start([*_compiler(), "--version"]) as job:
        version, _ = job.communicate()
    versions = [torch.__version__, str(torch.version.git_version), *platform.libc_ver(), version]
    found = sha256("\0".join([*versions, *_compiler()[1:], *_flags()]).encode())
    for file in sorted(SOURCES.iterdir()):
        found.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return found.hexdigest()[:16]


@cache
def name() -> str:
    """The namespace of the compiled operators; another version of this package may have its own in this process."""
    return _PREFIX + _digest()


def _library() -> Path:
    return folder() / f"{name()}.so"


def _report() -> Path:
    """The report of this command's failure: another copy of the same torch may have a header that this one lacks."""
    command = sha256("\0".join(_command()).encode()).hexdigest()[:8]
    return folder() / f"{name()}.{command}.txt"


def _reported() -> str | None:
    """The reason in the report of a failure, which is its first line; None without a report."""
    report = _report()
    try:
        with open_file(report) as file:
            return file.readline(_LONGEST).decode(errors="replace").strip() or None
    except OSError:
        return None


@cache
def _load() -> str | None:
    reason = _why_impossible()
    if reason is not None:
        return reason
    try:
        library = _library()
        reason = _compilation().result() if library_file.why_unsound(library) else None
        if reason is None:
            library_file.load(library)
    except (OSError, RuntimeError) as error:  # no home, no permission, no space, or a library that does not load
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        logger.warning(
            "The attention kernels for this CPU are not available: %s. PyTorch computes attention instead, which takes "
            "longer. To turn this message off, set HF_QKNORM_CPU=0 in the environment",
            reason,
        )
    return reason


def _is_compiling() -> bool:
    """Whether the compiler is at work in its thread, which is started if the library is missing."""
    if _load.cache_info().currsize or why_unavailable() is not None:
        return False
    try:
        return library_file.why_unsound(_library()) is not None and not _compilation().done()
    except RuntimeError:  # no thread can be started: `_load` has the reason
        return False


@cache
def _compilation() -> Future[str | None]:
    """The result of `_build` in a thread. The process does not end before it is there."""
    return ThreadPoolExecutor(1, "hf_qknorm_compiler").submit(_build)


os.register_at_fork(after_in_child=_compilation.cache_clear)  # the child has no such thread


def _build() -> str | None:
    """Compile, unless another process did so meanwhile. Returns the reason for a failure."""
    library = _library()
    make_folder()
    if os.path.lexists(library):
        logger.warning("%s. The library is compiled again", library_file.why_unsound(library))
    with FileLock(library.with_suffix(".lock")):
        if library_file.why_unsound(library) is None:
            return None
        if reason := _reported():
            return reason
        logger.warning(
            "Compiling the attention kernels for this CPU, once, in about a minute: %s. Training waits for them, "
            "and inference runs in PyTorch meanwhile",
            library,
        )
        try:
            library_file.store_library(library, _compile)
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if "error" in line] or [error.stderr.strip()[-200:]]
            reason = f"{_compiler()[0]} failed with status {error.returncode}: {lines[0]}"
            if error.returncode > 0 and not any(text in error.stderr for text in _TEMPORARY):
                reason = f"{reason}. The whole report is in {_report()}: delete it to compile again"
                store_text(_report(), f"{reason}\n{error.stderr}")
            return reason
    logger.warning("The attention kernels for this CPU are compiled")
    for report in folder().glob(f"{name()}.*.txt"):  # of copies of the same torch that lack a header
        report.unlink(missing_ok=True)
    remove_unused(_FILES)
    return None


def _compile(library: Path) -> None:
    """Compile the sources, several at once, and link them. Raises CalledProcessError.

    It starts no threads: Python refuses them while a process ends, and the end of a process waits for this.
    """
    most = min(len(os.sched_getaffinity(0)), MOST_COMPILERS)
    with TemporaryDirectory() as folder, ExitStack() as started:
        objects, jobs = [], deque[subprocess.Popen[str]]()
        for source in sorted(SOURCES.glob("*.cpp"), key=lambda file: file.stat().st_size, reverse=True):
            if len(jobs) == most:
                _finish(jobs.popleft())
            objects.append(f"{folder}/{source.stem}.o")
            jobs.append(started.enter_context(_start(_command("-c", str(source), "-o", objects[-1]))))
        while jobs:
            _finish(jobs.popleft())
        _finish(started.enter_context(_start(_command(*objects, "-o", str(library)))))


_STARTING: Final = RLock()  # a signal's handler may fork in the thread that holds it
os.register_at_fork(before=_STARTING.acquire, after_in_parent=_STARTING.release, after_in_child=_STARTING.release)


def _start(command: list[str]) -> subprocess.Popen[str]:
    """Start a compiler. No other thread forks meanwhile: its child would hold the pipes open that this waits at."""
    with _STARTING:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")


def _finish(job: subprocess.Popen[str]) -> None:
    """Wait for a process. Raises CalledProcessError if it failed."""
    output, errors = job.communicate()
    if job.returncode:
        raise subprocess.CalledProcessError(job.returncode, job.args, output, errors)
