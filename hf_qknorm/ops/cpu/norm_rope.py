"""Norm and RoPE of heads in C++ on the CPU, and the heads that they take.

All arithmetic is in fp32, whatever the dtype of the heads, with one rounding at the end.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from hf_qknorm.ops.checks import refuse_forward_mode
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.fused_checks import why_not_rotary
from hf_qknorm.ops.registration import NORM_ROPE, PARAMETERS, QUERIES_KEYS, differentiable, pack_norms
from hf_qknorm.ops.types import DTYPES, MOST_COLUMNS, Heads, Norm, Rotary

KINDS: Final = ("none", "rms", "layer", "l2")
FIELDS: Final = QUERIES_KEYS | NORM_ROPE


def norm_rope(heads: Heads) -> tuple[Tensor, Tensor]:
    """`reference.norm_rope`, rounded once: q `[B, H, T, D]` and k `[B, Hk, T, D]`, both contiguous.

    Attention in C++ reads them faster so than laid out as `[B, T, H, D]`.
    """
    return _run(*heads[:2], *pack_norms(*heads[3:]))


def norm_rope_one(x: Tensor, norm: Norm, rotary: Rotary | None) -> Tensor:
    """Norm and rotate queries or keys `[B, H, T, D]` alone."""
    return _run(x, None, *pack_norms(norm, Norm(), rotary))[0]


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    refuse_forward_mode(arguments)
    found: tuple[Tensor, Tensor]
    found = build.overload("differentiable_norm_rope" if torch.is_grad_enabled() else "norm_rope")(*arguments)
    return found


def why_not(heads: Heads) -> str | None:
    """The reason why the kernels do not norm and rotate these heads now, or None; as `attention.why_not`."""
    q, _, _, q_norm, k_norm, rotary = heads
    if torch.compiler.is_compiling():
        return "a compiler fuses PyTorch's operations with those around them"
    if not (q.is_cpu and type(q) is Tensor and q.dtype in DTYPES and q.shape[3] <= MOST_COLUMNS):
        return f"the C++ kernels do not take heads {list(q.shape)} in {q.dtype} on {q.device}"
    if q_norm.kind not in KINDS or k_norm.kind not in KINDS:
        return f"the C++ kernels have the norms {', '.join(KINDS)}, and not {q_norm.kind} and {k_norm.kind}"
    return why_not_rotary(rotary, q) or build.why_not(wait=torch.is_grad_enabled())


@build.once_loaded
def _add(compiled: build.Overloads) -> build.Overloads:
    def backward(dq: Tensor, dk: Tensor, q: Tensor, k: Tensor | None, *norms: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = compiled["norm_rope_backward"](dq, None if k is None else dk, q, k, *norms)
        return found

    run = differentiable(FIELDS, (*QUERIES_KEYS, *PARAMETERS), compiled["norm_rope"], backward, kept=0)
    return {"differentiable_norm_rope": run}
