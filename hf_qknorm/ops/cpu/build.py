"""The C++ kernels: compiled once on a machine, at their first use, and loaded.

The library is stored in `files.cache_folder`. Its name has a digest of all that it is made from: the sources, the
command, the versions of compiler and torch, and the CPU's vector instructions. One process compiles while others wait
at a lock. The finished library is renamed into its place, so that no process loads a part of it.

The report of a compiler that fails is stored under the same name. Later processes read the reason there, and compile
again only when the digest has changed. A compiler that was killed, or had too little memory or disk space, leaves no
report: the next process tries again.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from filelock import FileLock

from hf_qknorm.files.atomic_io import replace_file, replace_text
from hf_qknorm.files.cache_folder import folder
from hf_qknorm.ops.traces import constant_in_traces

logger = logging.getLogger(__name__)

SOURCES: Final = Path(__file__).parent / "csrc"
# As torch's own kernels are compiled for these CPUs
VECTORS: Final = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
}
COMPILERS: Final = ("c++", "g++", "clang++")
_CAPTURED: Final[dict[str, Any]] = {"capture_output": True, "text": True, "errors": "replace"}
# In messages of a compiler that was killed, or had too little memory or disk space
_TEMPORARY: Final = ("No space left", "Cannot allocate memory", "out of memory", "Killed", "terminated")


def why_unavailable() -> str | None:
    """The reason why the kernels can't run on this machine, or None; it is cheap, and compiles nothing.

    A failure to compile is known once it has happened: see `why_not_built`.
    """
    reason = _why_impossible()
    if reason is not None:
        return reason
    try:
        return _reported() if _report().is_file() else None
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def why_not_ready() -> str | None:
    """The reason why the kernels can't be called at once, or None; compiles nothing."""
    reason = why_unavailable()
    if reason is None and not _library().is_file():
        return "the C++ kernels are not compiled yet, which happens in the first call outside of traces and workers"
    return reason or why_not_built()


@constant_in_traces
def why_not_built() -> str | None:
    """The reason why the kernels are not there after an attempt to compile them, or None.

    The first call on a machine compiles them, in less than a minute; the first call in a process loads them.
    """
    return _load()


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
def _command() -> list[str]:
    """The command, without the name of its output."""
    root = Path(torch.__file__).parent
    capability = torch.backends.cpu.get_cpu_capability()
    return [
        *(*_compiler(), "-std=c++20", "-O3", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden", "-w"),
        "-ffp-contract=off",  # products and sums are fused where the code says so, and alike in all passes
        *(*VECTORS[capability], f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *("-isystem", str(root / "include"), f"-L{root / 'lib'}"),
        *map(str, sorted(SOURCES.glob("*.cpp"))),
        *("-ltorch_cpu", "-lc10"),  # OpenMP, libgomp.so.1, is the one that torch has loaded, by its name
    ]


@cache
def _digest() -> str:
    version = subprocess.run([*_compiler(), "--version"], check=False, **_CAPTURED).stdout
    found = "\0".join([torch.__version__, version, *_command()]).encode()
    return sha256(found + b"".join(x.read_bytes() for x in sorted(SOURCES.iterdir()))).hexdigest()[:16]


@cache
def name() -> str:
    """The namespace of the compiled operators; another version of this package may have its own in this process."""
    return f"hf_qknorm_cpu_{_digest()}"


def _library() -> Path:
    return folder() / f"{name()}.so"


def _report() -> Path:
    return folder() / f"{name()}.txt"


def _reported() -> str:
    """The reason in the report of a failure, which is its first line."""
    return _report().read_text(encoding="utf-8").partition("\n")[0]


@cache
def _load() -> str | None:
    reason = _why_impossible()
    if reason is not None:
        return reason
    try:
        library = _library()
        if not library.is_file():
            reason = _build(library)
        if reason is None:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:  # no home, no permission, no space, or a library that does not load
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        logger.warning(
            "The attention kernels for this CPU are not available: %s. PyTorch computes attention instead, which takes "
            "longer. To turn this message off, set HF_QKNORM_CPU=0 in the environment",
            reason,
        )
    return reason


def _build(library: Path) -> str | None:
    """Compile, unless another process did so meanwhile. Returns the reason for a failure."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if library.is_file():
            return None
        if _report().is_file():
            return _reported()
        logger.warning("Compiling the attention kernels for this CPU, once, in less than a minute: %s", library)
        command = [*_command(), f"-DHF_QKNORM_LIBRARY={name()}", "-o"]
        try:
            replace_file(library, lambda path: subprocess.run([*command, str(path)], check=True, **_CAPTURED))
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if "error" in line] or [error.stderr.strip()[-200:]]
            reason = f"{command[0]} failed with status {error.returncode}: {lines[0]}"
            if error.returncode > 0 and not any(text in error.stderr for text in _TEMPORARY):
                reason = f"{reason}. The whole report is in {_report()}: delete it to compile again"
                replace_text(_report(), f"{reason}\n{error.stderr}")
            return reason
        return None
