"""`attention` and its statistics in C++ on the CPU: the operator `cpu_attention`, and the calls that they take.

Arithmetic is in fp32, whatever the dtype of the heads, but for the products of bf16 heads where the CPU has AVX-512
BF16: it multiplies bf16 numbers, and adds in fp32.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from hf_qknorm.ops.checks import check_call, refuse_forward_mode, why_not_ranges
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.library import with_seed
from hf_qknorm.ops.registration import AS_CALL, HEADS, OPTIONS, VISIBLE, Operator, flatten, is_plain
from hf_qknorm.ops.tiled import HeadStatistics
from hf_qknorm.ops.types import DTYPES, MOST_COLUMNS, Heads, Options, Visible, laid_out

MOST_KEYS: Final = 1 << 24  # positions are compared in fp32


def attention(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """`library.attention` in C++: softmax(cap(scale·q·kᵀ))·v, `[B, H, T, D]`, laid out as `[B, T, H, D]`.

    For the same seed it drops other weights than `library.attention`: each is a function of seed, head, query and key
    alone. With the same number of threads, the gradients have the same bits on each run.

    Raises ValueError for a call that it does not take, with the reason (`why_not`), and RuntimeError where the kernels
    can't be compiled (`build.why_not_built`).
    """
    if heads.raw:
        raise ValueError("the C++ kernels do not take this call: they take heads after norm and rotation")
    visible = with_seed(visible, options, heads.q.device)
    tensors = *heads[:3], *visible
    refuse_forward_mode(tensors)
    if is_plain(tensors):  # a step of generation: the operator's own fields would take as long as the kernel
        check(heads, visible, options)
        return attend(heads, visible, options)
    call = heads, visible, options
    return CPU_ATTENTION(flatten(*call), call)[0]


@torch.no_grad()
def head_statistics(heads: Heads, visible: Visible, options: Options, cap: float = 50.0) -> HeadStatistics:
    """`tiled.head_statistics` in C++, in fp32.

    Raises ValueError for a call that it does not take, and RuntimeError where the kernels can't be compiled.
    """
    check(heads, visible, options)
    # For each query `[B, H, T, 5]`: largest |scale·q·k|, entropy, and numbers of keys; zeros for one without keys
    numbers: Tensor = build.operators().measure(*heads[:3], *visible[:3], *options, cap)
    largest, entropy, *counts = numbers.unbind(-1)
    seen, over_half, over_cap = (x.sum((0, 2), dtype=torch.float64).to(torch.int64) for x in counts)
    queries = (counts[0] > 0).sum((0, 2)).clamp_min(1)
    top = largest.amax((0, 2)) if largest.numel() else largest.new_zeros(heads.q.shape[1])
    return HeadStatistics(top, entropy.sum((0, 2)) / queries, seen, over_half, over_cap)


def why_not(heads: Heads, visible: Visible, options: Options) -> str | None:
    """The reason why the kernels do not take a call, or None; `build.why_not_built` knows whether they are there."""
    q, k = heads.q, heads.k
    if heads.raw:
        return "the C++ kernels take heads after norm and rotation"
    if q.device.type != "cpu":
        return f"the C++ kernels are for CPUs, and the heads are on {q.device}"
    if visible.mask is not None:
        return why_not_ranges(visible)
    if q.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return f"the C++ kernels take {known}, and the heads are {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] > MOST_COLUMNS:
        return f"the C++ kernels take a head_dim of up to {MOST_COLUMNS}, and it is {q.shape[3]}"
    if k.shape[2] > MOST_KEYS:
        return f"the C++ kernels take up to {MOST_KEYS} keys, and there are {k.shape[2]}"
    return None


def check(heads: Heads, visible: Visible, options: Options, **results: Tensor) -> None:
    """Raise ValueError unless the kernels take a call, with the reason."""
    check_call(heads, visible, options)
    reason = None if heads.q.is_meta else why_not(heads, visible, options)
    if reason is not None:
        raise ValueError(f"the C++ kernels do not take this call: {reason}. Use library.attention")


def attend(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """Attention output `[B, H, T, D]` alone, laid out as `[B, T, H, D]`; faster than `forward` for a few queries."""
    return build.overload("attend")(*heads[:3], *visible[:3], *options)


def forward(heads: Heads, visible: Visible, options: Options) -> tuple[Tensor, Tensor]:
    """Attention output `[B, H, T, D]` (laid out as `[B, T, H, D]`), and the normaliser `[B, H, T, 2]`.

    A weight is e^(logit - first)·second of the normaliser; the second is 0 for a query without keys.
    """
    return build.operators().forward(*heads[:3], *visible[:3], *options)


def backward(
    heads: Heads, visible: Visible, options: Options, grad: Tensor, out: Tensor, normaliser: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and the sinks, from `grad` `[B, H, T, D]` and the results of `forward`."""
    q, k, v = heads[:3]
    normaliser = normaliser.contiguous()
    dq = q.new_zeros((_key_parts(q, k), *q.shape), dtype=torch.float32)
    dk, dv, delta = laid_out(k), laid_out(v), normaliser.new_empty(q.shape[:3])
    results = (grad, out, normaliser)
    build.operators().backward(*heads[:3], *visible[:3], *options, *results, dq, dk, dv, delta)
    total = dq[0] if len(dq) == 1 else dq.sum(0)
    return total.to(q.dtype), dk, dv, _sink_gradient(visible.sinks, normaliser, delta)


def _sink_gradient(sinks: Tensor | None, normaliser: Tensor, delta: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    shift, inverse = normaliser.unbind(-1)
    weights = torch.exp(sinks.float()[:, None] - shift).mul_(inverse)
    return weights.masked_fill_(inverse == 0, 0.0).mul_(delta).sum((0, 2)).neg_().to(sinks.dtype)


def _key_parts(q: Tensor, k: Tensor) -> int:
    """The parts of the keys in backward: as many as give each thread several pieces of work, each of 512 keys."""
    places, threads = k.shape[0] * k.shape[1], torch.get_num_threads()
    if places % threads == 0 or places >= 4 * threads:
        return 1
    return max(1, min(-(-4 * threads // places), k.shape[2] // 512))


CPU_ATTENTION = Operator("cpu_attention", HEADS | VISIBLE | OPTIONS, "(Tensor, Tensor)", AS_CALL, check)
CPU_ATTENTION_BACKWARD = CPU_ATTENTION.derivative(("grad",), ("out", "normaliser"), (*HEADS, "sinks"))
CPU_ATTENTION.implement(forward)
CPU_ATTENTION_BACKWARD.implement(backward)


@CPU_ATTENTION.fake
def _(heads: Heads, *_: Any) -> tuple[Tensor, Tensor]:
    return laid_out(heads.q), heads.q.new_empty((*heads.q.shape[:3], 2), dtype=torch.float32)


@CPU_ATTENTION_BACKWARD.fake
def _(heads: Heads, visible: Visible, options: Options, **results: Tensor) -> tuple[Tensor | None, ...]:
    dsinks = None if visible.sinks is None else torch.empty_like(visible.sinks)
    return heads.q.new_empty(heads.q.shape), laid_out(heads.k), laid_out(heads.v), dsinks
