"""The C++ kernels: compiled once by `torch.utils.cpp_extension`, in a thread that starts at their first use.

Each library has its own folder, and its operators their own namespace, by a digest of sources, places, flags and torch.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from filelock import FileLock

from hf_qknorm.files.log import logger
from hf_qknorm.ops.traces import constant_in_traces, is_exporting

SOURCES: Final = Path(__file__).parent / "csrc"
# As torch's own kernels are compiled for these CPUs
VECTORS: Final = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
}
OPERATORS: Final = ("forward", "backward", "measure", "norm_rope", "norm_rope_backward")
SWITCH: Final = "HF_QKNORM_CPU"
COMPILING: Final = "the C++ kernels are being compiled"


def why_not(wait: bool = True) -> str | None:
    """The reason why the kernels can't be called now, or None. The first call of a process loads them.

    The first call on a machine compiles them, in a thread, in about a minute. A call that does not `wait` returns a
    reason, `COMPILING`, until the compiler is done. Nothing is compiled in a trace, nor in a daemon, such as a worker
    of a DataLoader: many start at once.

    Raises RuntimeError if HF_QKNORM_CPU=1 demands kernels that can't be compiled, and ValueError for another switch.
    """
    traced = torch.compiler.is_compiling()
    if not traced and _overloads and _switch() != "0":  # in this order: a trace would see the kernels as before it
        return None
    return _why_not(wait, traced, is_exporting())


@constant_in_traces
def _why_not(wait: bool, traced: bool, exported: bool) -> str | None:
    if exported:
        return "an exported graph runs on machines without the C++ kernels, too"
    if (wanted := _switch()) == "0":
        return f"{SWITCH}=0 turns the C++ kernels off"
    reason = None if _overloads else _why_not_loaded(wait or wanted == "1", traced)
    if reason is not None and wanted == "1":
        raise RuntimeError(
            f"{SWITCH}=1 demands the C++ kernels for attention on a CPU, which do not run here: {reason}. Remove the "
            f"cause, or unset {SWITCH}, to compute attention in PyTorch"
        )
    return reason


@cache
def _switch() -> str | None:
    """The switch, read once: to look a variable up takes as long as a small operator."""
    if (wanted := os.environ.get(SWITCH) or None) not in (None, "0", "1"):
        raise ValueError(f"{SWITCH} must be 1 (demand the C++ kernels) or 0 (never use them), got {wanted!r}")
    return wanted


def _why_not_loaded(wait: bool, traced: bool) -> str | None:
    if (reason := _why_impossible()) is not None:
        return reason
    if not _library().exists():
        if traced or multiprocessing.current_process().daemon:
            return "the C++ kernels are not compiled yet, which happens in the first call outside of traces and workers"
        if not wait and not _loading().done():
            return COMPILING
    return _loading().result()


Overloads = dict[str, Any]
_overloads: Overloads = {}  # of the compiled operators, by name: to look one up takes a part of a call's time


def overload(name: str) -> Any:
    """The only overload of a compiled operator. Raises RuntimeError, with the reason, if it is not there."""
    if not _overloads and (reason := _why_not_loaded(wait=True, traced=False)) is not None:  # torch.compile traces this
        raise RuntimeError(f"the C++ kernels for the CPU are not available: {reason}")
    return _overloads[name]


_additions: list[Callable[[Overloads], Overloads]] = []


def once_loaded(add: Callable[[Overloads], Overloads]) -> Callable[[Overloads], Overloads]:
    """Have `add` called with the compiled operators, once they are loaded; it returns more of them."""
    _additions.append(add)
    if _overloads:
        _overloads.update(add(_overloads))
    return add


@cache
def _why_impossible() -> str | None:
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.system() != "Linux":
        return f"the C++ kernels are for Linux, and this is {platform.system() or 'an unknown system'}"
    if capability not in VECTORS:
        return f"the C++ kernels need AVX2 or AVX-512, and torch reports {capability} for this CPU"
    compiler = os.environ.get("CXX", "c++")  # as cpp_extension reads it
    if not shutil.which((compiler.split() or [""])[0]):
        return f"there is no C++ compiler {compiler!r}: install one (Debian: g++), or name it in the variable CXX"
    return None


def _flags() -> list[str]:
    """The compiler's flags."""
    capability = torch.backends.cpu.get_cpu_capability()
    bf16 = ["-mavx512bf16"] if capability == "AVX512" and torch.cpu.get_capabilities()["avx512_bf16"] else []
    return [
        *("-std=c++20", "-O3", "-fopenmp", "-fvisibility=hidden", "-w"),
        "-ffp-contract=off",  # products and sums are fused where the code says so, and alike in all passes
        *(*VECTORS[capability], *bf16, f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"),
    ]


@cache
def name() -> str:
    """The namespace of the compiled operators; another version of this package may have its own in this process."""
    places = (str(SOURCES), torch.__file__)  # ninja compiles again when these change: two environments would take turns
    found = sha256("\0".join([torch.__version__, *places, *_flags()]).encode())
    for file in sorted(SOURCES.iterdir()):
        found.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return f"hf_qknorm_cpu_{found.hexdigest()[:16]}"


@cache
def _library() -> Path:
    """The compiled library, in the folder of torch's extensions."""
    from torch.utils.cpp_extension import get_default_build_root  # it imports setuptools

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()) / name() / f"{name()}.so"


@cache
def _loading() -> Future[str | None]:
    """The result of `_load` in a thread. The process does not end before it is there."""
    return ThreadPoolExecutor(1, "hf_qknorm_compiler").submit(_load)


os.register_at_fork(after_in_child=_loading.cache_clear)  # the child has no such thread


def _load() -> str | None:
    """Compile the library, unless it is there, and load it. Returns the reason for a failure, which it logs."""
    try:
        library = _library()
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_suffix(".lock")):  # one process compiles; the lock of one that is killed ends
            if not _overloads:
                _compile_and_load(library)
                found = {operator: getattr(getattr(torch.ops, name()), operator).default for operator in OPERATORS}
                for add in _additions:
                    found |= add(found)
                _overloads.update(found)
    except Exception as error:  # no home, no space, no setuptools, or a compiler that fails
        reason = f"{type(error).__name__}: {error}"
        logger.warning(
            f"The attention kernels for this CPU are not available: {reason}. PyTorch computes attention instead, "
            f"which takes longer. To turn this message off, set {SWITCH}=0 in the environment"
        )
        return reason
    return None


def _compile_and_load(library: Path) -> None:
    from torch.utils import cpp_extension

    if missing := not library.exists():
        logger.warning(
            f"Compiling the attention kernels for this CPU, once, in about a minute: {library}. Training waits for "
            "them, and inference runs in PyTorch meanwhile"
        )
    (library.parent / "lock").unlink(missing_ok=True)  # torch's, of a build that was killed: it would wait for ever
    cpp_extension.load(
        name(),
        [str(source) for source in sorted(SOURCES.glob("*.cpp"))],
        extra_cflags=_flags(),
        build_directory=str(library.parent),
        with_cuda=False,
        is_python_module=False,
    )
    if missing:
        logger.warning("The attention kernels for this CPU are compiled")
