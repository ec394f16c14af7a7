"""Norm and RoPE of heads in C++ on the CPU, and the heads that they take.

All arithmetic is in fp32, whatever the dtype of the heads, with one rounding at the end.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from hf_qknorm.ops.checks import refuse_forward_mode
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.fused_checks import why_not_rotary
from hf_qknorm.ops.registration import NORM, ROTARY, differentiable
from hf_qknorm.ops.types import DTYPES, MOST_COLUMNS, NO_ANGLES, Heads

KINDS: Final = ("none", "rms", "layer", "l2")
FIELDS: Final = {"x": "Tensor"} | {name: kind for name, kind in NORM.items() if name != "p"} | ROTARY


def norm_rope(heads: Heads) -> tuple[Tensor, Tensor]:
    """`reference.norm_rope`, rounded once: q `[B, H, T, D]` and k `[B, Hk, T, D]`, both contiguous.

    Attention in C++ reads them faster so than laid out as `[B, T, H, D]`.
    """
    q, k, _, q_norm, k_norm, rotary = heads
    run = build.overload("differentiable_norm_rope" if torch.is_grad_enabled() else "norm_rope")
    angles = rotary or NO_ANGLES
    refuse_forward_mode((q, k, *q_norm, *k_norm, *angles))
    return run(q, *q_norm[:4], q_norm.knee, *angles), run(k, *k_norm[:4], k_norm.knee, *angles)


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
    forward, backward = compiled["norm_rope"], compiled["norm_rope_backward"]
    return {"differentiable_norm_rope": differentiable(FIELDS, ("x", "gain", "bias"), forward, backward, kept=0)}
