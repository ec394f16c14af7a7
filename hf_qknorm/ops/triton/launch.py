"""How kernels are started: on their tensors' device, with the configuration that the table names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **options: Any) -> None:
    """Start `kernel` on `device`, which need not be the current one; `options` are its constants, warps and stages."""
    start(kernel, grid, device, arguments, options)


def _start(kernel: Any, grid: tuple[int, ...], device: torch.device, arguments: Any, options: dict[str, Any]) -> None:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **options, enable_fp_fusion=True)


start: Callable[..., None] = _start  # replaced by what compiles without starting
