"""Trust at first use: whether kernels passed their self-check on this machine, for the code path of a call.

A process checks each path at its first call, or reads its verdict from the disk. Where no check can run (a trace, a
graph capture, a backward pass, fake tensors), a path without a verdict is trusted. HF_QKNORM_CHECK=0 in the environment
trusts every path.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_qknorm.ops.traces import constant_in_traces
from hf_qknorm.ops.trust import self_check, verdict_files
from hf_qknorm.ops.trust.code_path import CPU_OPERATORS, CodePath, OperatorName, fields
from hf_qknorm.ops.types import Heads, Options, Visible

logger = logging.getLogger(__name__)

SWITCH: Final = "HF_QKNORM_CHECK"
CHECKED: Final = ("cuda",)  # kinds of devices; Triton's interpreter is for tests, which check the kernels themselves
NAMES: Final[dict[str, str]] = {"cpu": "hf_qknorm_cpu"}  # attention functions of operators; of others hf_qknorm_triton
_UNKNOWN: Final = "unknown"

_reasons: dict[tuple[Any, ...], str | None] = {}  # of this process: by device and fields of a path, None for trust
_absent: set[tuple[Any, ...]] = set()  # keys that the disk had no reason for when no check could run
_lock = Lock()


def why_distrusted(
    heads: Heads, visible: Visible, options: Options, operator: OperatorName = "attention"
) -> str | None:
    """The reason why an operator's kernels are not to be trusted with a call, or None; a first call checks them.

    Raises ValueError for a switch that is neither 1 nor 0, and OutOfMemoryError if the check has no room.
    """
    q, found = heads.q, fields(heads, visible, options, operator)
    if torch.compiler.is_compiling():
        return _known(str(q.device), *found)
    reason = _reasons.get(_key(q.device, found), _UNKNOWN)
    return _first_use(q, found) if reason is _UNKNOWN else reason


def has_verdict(heads: Heads, visible: Visible, options: Options, operator: OperatorName = "attention") -> bool:
    """Whether this process knows the verdict on a call's path: without one, it is trusted until a check can run."""
    return _key(heads.q.device, fields(heads, visible, options, operator)) in _reasons


def _key(device: torch.device, found: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key of a path's reason; for fp32 on a GPU, the precision of products selects code too."""
    precision = torch.backends.cuda.matmul.fp32_precision if device.type == "cuda" and torch.float32 in found else ""
    return device, precision, *found


@constant_in_traces
def _known(device: str, *found: Any) -> str | None:
    """The reason that this process or the disk knows; None for a path without a verdict."""
    place = torch.device(device)
    key = _key(place, found)
    if key not in _reasons and key not in _absent and is_checked(place, found[0]):
        stored = verdict_files.read(place, CodePath.of(found))
        if stored is None:
            _absent.add(key)
        else:
            _reasons[key] = _warned(stored.reason, found[0])
    return _reasons.get(key)


def _first_use(q: Tensor, found: tuple[Any, ...]) -> str | None:
    if not _can_check(q):
        return _known(str(q.device), *found)
    key = _key(q.device, found)
    with _lock:
        if key not in _reasons:
            _reasons[key] = _verdict(q.device, CodePath.of(found))
    return _warned(_reasons[key], found[0])


def _can_check(q: Tensor) -> bool:
    """Whether a check can run now. In a backward pass it would wait for the thread that it runs in."""
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (capturing or isinstance(q, FakeTensor) or torch._C._current_graph_task_id() != -1)


@cache
def _warned(reason: str | None, operator: OperatorName) -> str | None:
    """The same reason, after a warning for its first time."""
    if reason is None:
        return None
    instead, off = "PyTorch norms and rotates instead", "set HF_QKNORM_CPU=0 in the environment"
    if operator == "cpu_statistics":
        instead = "PyTorch measures the logits instead"
    elif operator != "cpu_norm_rope":
        name = NAMES.get(operator, "hf_qknorm_triton")
        instead = f'Another implementation takes these calls, and attn_implementation="{name}" refuses them'
        off = 'use attn_implementation="hf_qknorm_tiled"'
    logger.warning(
        "%s. %s. Please report this message to the authors of hf_qknorm. To turn the kernels off, %s. To run them "
        "unchecked, set %s=0 in the environment. To check them again, delete hf_qknorm from $XDG_CACHE_HOME or "
        "~/.cache",
        reason,
        instead,
        off,
        SWITCH,
    )
    return reason


def is_checked(device: torch.device, operator: OperatorName = "attention") -> bool:
    """Whether an operator's kernels on a device are checked. Raises ValueError for a switch that is neither 1 nor 0."""
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be 1 (check the kernels at their first use) or 0 (never), got {value!r}")
    return value == "1" and (operator in CPU_OPERATORS or device.type in CHECKED)


def _verdict(device: torch.device, path: CodePath) -> str | None:
    """The reason for distrust, or None: by the disk, else by the self-check, whose verdict is kept there.

    Raises OutOfMemoryError. Other errors are reasons, and are kept if the kernels broke the device: a compiler's may
    have left by the next process.
    """
    if not is_checked(device, path.operator):
        return None
    stored = verdict_files.read(device, path)
    if stored is not None:
        return stored.reason
    kept, failure = True, None
    try:
        name, found = self_check.check(path, device)
        if not found.passed:
            failure = f"the {name} has a relative error of {found.error:.1e}, and {found.budget:.1e} is allowed"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # drivers and compilers raise anything
        kept = isinstance(error, torch.AcceleratorError)
        failure = " ".join(f"{type(error).__name__}: {error}".split())
    reason = None
    if failure is not None:
        machine = verdict_files.machine(device, path.operator)
        reason = f"the self-check of {path.operator} failed: {failure} ({path}; {machine})"
    if kept:
        verdict_files.write(device, path, reason)
    return reason
