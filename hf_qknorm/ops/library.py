"""The public operators over q `[B, H, T, D]` and k, v `[B, Hk, S, D]`, with H a multiple of Hk.

torch.compile sees each as one node. Importing this module loads no kernels. All of them raise NotImplementedError in
forward mode (`torch.func.jvp`), and RuntimeError for a second derivative. None checks its arguments, which
`checks.check_call` does once for a call; the fused ones take heads for which `why_not_fused` or `why_not_norm_rope` has
no reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops import operators, tiled
from hf_qknorm.ops.checks import refuse_forward_mode
from hf_qknorm.ops.fused_checks import why_not_fused as why_not_fused
from hf_qknorm.ops.fused_checks import why_not_norm_rope as why_not_norm_rope
from hf_qknorm.ops.registration import pack, pack_norms
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible


def attention(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """softmax(cap(scale·q·kᵀ) + mask)·v in linear memory, in PyTorch: `[B, H, T, D]`, laid out as `[B, T, H, D]`.

    The arguments are as in `reference.attention`, but dropout is a rate.

    Raises ValueError for heads that are still raw.
    """
    if heads.raw:
        raise ValueError("attention takes heads after norm and rotation: use fused_attention for raw ones")
    visible = with_seed(visible, options, heads.q.device)
    return _call(tiled.attention, *heads[:3], *visible, *options)


def fused_attention(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """`attention` in the kernels, after the heads' norms and rotation. It takes no mask.

    T and S may differ for heads that are not raw. Backward keeps raw q, k and v, the output and two numbers for each
    query; its gradients are the same bits on each run.
    """
    visible = with_seed(visible, options, heads.q.device)
    return _call(operators.fused_attention, *pack(heads, visible, options), False)


class RowStatistics(NamedTuple):
    """Each query's logits `[B, H, T]`: the largest |scale·q·k| before the cap, and the weights' entropy in nats."""

    largest: Tensor
    entropy: Tensor


@torch.no_grad()
def fused_statistics(heads: Heads, visible: Visible, options: Options) -> RowStatistics:
    """Measure the logits of `fused_attention`, without dropout, without gradients, and without a T×S tensor."""
    packed = pack(heads, visible, options._replace(dropout=0.0))
    return RowStatistics(*operators.FUSED_ATTENTION(*packed, True)[2:])


def norm_rope(heads: Heads) -> tuple[Tensor, Tensor]:
    """Norm and rotate q `[B, H, T, D]` and k `[B, Hk, T, D]` in one launch."""
    return _call(operators.norm_rope, *heads[:2], *pack_norms(*heads[3:]))


def norm_rope_one(x: Tensor, norm: Norm, rotary: Rotary | None) -> Tensor:
    """Norm and rotate queries or keys `[B, H, T, D]` alone."""
    return _call(operators.norm_rope, x, None, *pack_norms(norm, Norm(), rotary))[0]


def _call(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operator; a tangent of forward mode, which it would drop, is refused."""
    refuse_forward_mode(arguments)
    return operator(*arguments)


def with_seed(visible: Visible, options: Options, device: torch.device) -> Visible:
    """The same with a seed from torch's default generator, if there is dropout and no seed yet."""
    if not options.dropout > 0 or visible.seed is not None:
        return visible
    return visible._replace(seed=torch.randint(torch.iinfo(torch.int64).max, (1,), device=device))
