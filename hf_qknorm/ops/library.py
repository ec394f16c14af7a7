"""The public operators over q `[B, H, T, D]` and k, v `[B, Hk, S, D]`, with H a multiple of Hk.

torch.compile sees each as one node. Importing this module loads no kernels. All of them raise ValueError for arguments
that do not fit, and NotImplementedError in forward mode (`torch.func.jvp`) and for a second derivative. The fused ones
raise ValueError, with the reason, for heads that the kernels do not take: see `why_not_fused`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_qknorm.ops import operators
from hf_qknorm.ops.fused_checks import why_not_fused as why_not_fused
from hf_qknorm.ops.registration import flatten, flatten_norms
from hf_qknorm.ops.types import Heads, LayerCache, Norm, Options, Rotary, Visible


def attention(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """softmax(cap(scale·q·kᵀ) + mask)·v in linear memory, in PyTorch: `[B, H, T, D]`, laid out as `[B, T, H, D]`.

    The arguments are as in `reference.attention`, but dropout is a rate: without a seed, one is drawn from
    torch's default generator; backward repeats the mask. Starts and stops of the ranges must not decrease down the
    rows, which is not checked. Raises ValueError for heads that are still raw, and for a mask that requires a gradient.
    """
    if heads.raw:
        raise ValueError("attention takes heads after norm and rotation: use fused_attention for raw ones")
    if visible.mask is not None and visible.mask.requires_grad:
        raise ValueError(
            "the mask requires a gradient, which this attention does not compute: detach it, or use "
            'eager attention, such as attn_implementation="hf_qknorm_eager"'
        )
    call = heads, with_seed(visible, options, torch.device("cpu")), options
    return operators.ATTENTION(flatten(*call), call)[0]


def fused_attention(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """`attention` in the kernels, after the heads' norms and rotation. It takes no mask.

    T and S may differ for heads that are not raw. Backward keeps raw q, k and v, the output and two numbers for each
    query; its gradients are the same bits on each run.
    """
    call = heads, with_seed(visible, options, heads.q.device), options
    return operators.FUSED_ATTENTION(flatten(*call) | {"statistics": False}, call)[0]


class RowStatistics(NamedTuple):
    """Each query's logits `[B, H, T]`: the largest |scale·q·k| before the cap, and the weights' entropy in nats."""

    largest: Tensor
    entropy: Tensor


@torch.no_grad()
def fused_statistics(heads: Heads, visible: Visible, options: Options) -> RowStatistics:
    """Measure the logits of `fused_attention`, without dropout, without gradients, and without a T×S tensor."""
    call = heads, visible, options._replace(dropout=0.0)
    return RowStatistics(*operators.FUSED_ATTENTION(flatten(*call) | {"statistics": True}, call)[2:])


def norm_rope(heads: Heads) -> tuple[Tensor, Tensor]:
    """Norm and rotate q `[B, H, T, D]` and k `[B, Hk, T, D]` in one launch."""
    return operators.NORM_ROPE_HEADS({"q": heads.q, "k": heads.k, **flatten_norms(*heads[3:])})


def norm_rope_one(x: Tensor, norm: Norm, rotary: Rotary | None) -> Tensor:
    """Norm and rotate queries or keys `[B, H, T, D]` alone."""
    return operators.NORM_ROPE_HEADS({"q": x, "k": None, **flatten_norms(norm, Norm(), rotary)})[0]


def fused_step(heads: Heads, cache: LayerCache, visible: Visible, options: Options) -> Tensor:
    """`norm_rope` and `fused_attention` over a cache, in two launches where T is small: a step of generation.

    The new keys and values are written behind the `filled` ones, and T is added to `filled`, all in place; without
    `filled` they are written to the last T rows. No gradient, and no dropout. Raises ValueError if a tensor, such as a
    gain, requires a gradient, and for a cache that does not fit, and IndexError for a static cache without room, which
    on a GPU an assertion in the kernel reports, later. Nothing outside of the cache is written.
    """
    values = flatten(heads, visible, options) | cache._asdict()
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values.values()):
        raise ValueError("writing to a cache has no gradient: call it under torch.no_grad(), or use norm_rope")
    out = operators.FUSED_STEP(values)
    if not torch.compiler.is_compiling():  # kernels write by address: a graph over the cache's tensors is stale now
        increment_version([x for x in cache if x is not None])
    return out


def with_seed(visible: Visible, options: Options, device: torch.device) -> Visible:
    """The same with a seed from torch's default generator, if there is dropout and no seed yet."""
    if not options.dropout > 0 or visible.seed is not None:
        return visible
    return visible._replace(seed=torch.randint(torch.iinfo(torch.int64).max, (1,), device=device))
