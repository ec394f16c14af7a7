"""Functions that torch.compile calls while it traces, and does not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_traces(function: Function) -> Function:
    """Mark a function whose result a trace takes as a constant.

    As torch.compiler.assume_constant_result does, which imports torch._dynamo, and with it Triton.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_traces
def is_exporting() -> bool:
    """Whether torch.export traces. `torch.compiler.is_exporting` is true in every trace with torch 2.11."""
    return torch.compiler.is_exporting()


@constant_in_traces
def needs_torch() -> bool:
    """Whether torch's own operators must compute: in an exported graph, and for torch.func and forward mode."""
    return is_exporting() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
