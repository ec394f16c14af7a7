"""Verdicts of self-checks on disk, one small file each, by machine, versions and code path.

They lie in `files.cache_folder`. A folder that can't be written keeps none. A file that can't be read, that another
user may write to, or that is of another machine, version or path, counts as absent.
"""

from __future__ import annotations

import json
import logging
import re
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from hf_qknorm.files.cache_folder import UntrustedError, folder, make_folder, open_file, remove_unused, store_text
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.trust.code_path import CPU_OPERATORS, CodePath, OperatorName
from hf_qknorm.version import __version__

logger = logging.getLogger(__name__)

_DRIVER = Path("/proc/driver/nvidia/version")  # on Linux
_FILES: Final = re.compile(r"[0-9a-f]{32}(?=\.json)")
_LARGEST: Final = 2**16  # bytes


class Stored(NamedTuple):
    """A verdict on disk: the reason for distrust, or None for a check that passed."""

    reason: str | None


def write(device: torch.device, path: CodePath, reason: str | None) -> None:
    """Keep a verdict, if the folder can be written."""
    key = _key(device, path)
    try:
        store_text(make_folder() / _name(key), json.dumps({"key": key, "reason": reason}))
        remove_unused(_FILES)
    except (OSError, RuntimeError):  # no permission, no space, no home, or another process writes the same
        pass


def read(device: torch.device, path: CodePath) -> Stored | None:
    """The verdict on a path, or None without one."""
    key = _key(device, path)
    try:
        with open_file(folder() / _name(key)) as file:
            found = json.loads(file.read(_LARGEST))
    except UntrustedError as error:
        _warn(str(error))
        return None
    except (OSError, RuntimeError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("key") != key:
        return None
    reason = found.get("reason", 0)
    return Stored(reason) if reason is None or isinstance(reason, str) else None


@cache
def _warn(reason: str) -> None:
    logger.warning("The verdicts on kernels are not read: %s", reason)


def machine(device: torch.device, operator: OperatorName = "attention") -> str:
    """The device's name, the driver, and the versions of packages; for a CPU also the compiled library."""
    name, driver = ("CPU", "none")
    if operator in CPU_OPERATORS:
        name = f"CPU with {torch.backends.cpu.get_cpu_capability()} and {build.name()}"
    if device.type == "cuda":
        name, driver = torch.cuda.get_device_name(device), _driver()
    versions = f"torch {torch.__version__}, Triton {_triton()}, hf_qknorm {__version__}"
    return f"{name}, driver {driver}, {versions}"


@cache
def _driver() -> str:
    """The driver's version, or the version of CUDA that it supports where its file is absent."""
    try:
        return _DRIVER.read_text(encoding="utf-8").splitlines()[0]
    except OSError:
        found: Any = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")  # only builds for CUDA have it
        return f"for CUDA {found()}"


@cache
def _triton() -> str:
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


@cache
def _sources() -> str:
    """A digest of the operators' code, which changes between releases, too, where it is developed."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _key(device: torch.device, path: CodePath) -> list[str]:
    """A verdict's key; the number of a device is not a part of it."""
    return [machine(device, path.operator), torch.backends.cuda.matmul.fp32_precision, _sources(), repr(tuple(path))]


def _name(key: list[str]) -> str:
    return f"{sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"
