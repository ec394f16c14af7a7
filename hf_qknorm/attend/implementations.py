"""The implementations of attention, in the order in which `attn_implementation="hf_qknorm"` tries them.

A new one is an entry of `IMPLEMENTATIONS`, and its name an attention function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from hf_qknorm.files.log import logger
from hf_qknorm.ops import library
from hf_qknorm.ops.checks import why_not_ranges
from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.types import Call

_logged: set[str] = set()


class Implementation(NamedTuple):
    """An implementation of attention: `run` computes `[B, H, T, D]` unless there is a reason `why_not`.

    "hf_qknorm" tries it on these `devices`, none for all. `name` is the attention function that takes it, or raises
    ValueError with the reason. `words` name it in logs. `prepare` waits for a compiler, as `why_not` does in training
    alone.
    """

    name: str
    words: str
    devices: tuple[str, ...]
    why_not: Callable[[Call], str | None]
    run: Callable[[Call], Tensor]
    prepare: Callable[[], object] = lambda: None


def _why_not_triton(call: Call) -> str | None:
    return why_not_ranges(call.visible) or library.why_not_fused(call.heads)


TRITON: Final = Implementation(
    "hf_qknorm_triton", "its Triton kernels", ("cuda",), _why_not_triton, lambda call: library.fused_attention(*call)
)
CPP: Final = Implementation(
    "hf_qknorm_cpu", "its C++ kernels", ("cpu",), cpu.why_not, cpu.attention, prepare=build.why_not
)
TILED: Final = Implementation(
    "hf_qknorm_tiled", "tiled in PyTorch", (), lambda call: None, lambda call: library.attention(*call)
)
IMPLEMENTATIONS: Final = (TRITON, CPP, TILED)


class Choice(NamedTuple):
    """The implementation of a call, and the reasons against the ones before it; None if there are none."""

    implementation: Implementation
    reason: str | None

    def __str__(self) -> str:
        return self.implementation.words if self.reason is None else f"{self.implementation.words}: {self.reason}"


def choose(call: Call) -> Choice:
    """The first implementation that takes a call on its device, which the first call of a kind logs."""
    device, reasons = device_type(call.heads.q), []
    for implementation in IMPLEMENTATIONS:
        if implementation.devices and device not in implementation.devices:
            continue
        if (reason := implementation.why_not(call)) is None:
            break
        reasons.append(reason)
    if device not in ("cuda", "cpu"):
        reasons.append("the kernels are for NVIDIA GPUs and CPUs")
    reason = "; ".join(reasons) or None
    log_once(f"runs {implementation.words}", reason)
    return Choice(implementation, reason)


def device_type(x: Tensor) -> str:
    """The type of a tensor's device, by which kernels are picked; tests of Triton's interpreter replace it."""
    return x.device.type


def log_once(message: str, reason: str | None = None) -> None:
    """Log a message at info level, with the reason of its first time, once a process; a traced graph is silent."""
    if torch.compiler.is_compiling() or message in _logged:  # in this order: a graph must not depend on the messages
        return
    _logged.add(message)
    logger.info("hf_qknorm attention %s%s", message, "" if reason is None else f": {reason}")
