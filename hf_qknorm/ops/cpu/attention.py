"""Attention and its statistics in C++ on the CPU, and the calls that they take.

Arithmetic is in fp32, whatever the dtype of the heads, but for the products of bf16 heads where the CPU has AVX-512
BF16: it multiplies bf16 numbers, and adds in fp32.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from hf_qknorm.ops.checks import refuse_forward_mode, why_not_ranges
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.library import with_seed
from hf_qknorm.ops.registration import HEADS, OPTIONS, differentiable
from hf_qknorm.ops.tiled import HeadStatistics
from hf_qknorm.ops.traces import constant_in_traces
from hf_qknorm.ops.types import DTYPES, MOST_COLUMNS, Call, Heads, Options, Visible, laid_out

MOST_KEYS: Final = 1 << 24  # positions are compared in fp32


def attention(call: Call) -> Tensor:
    """softmax(cap(scale·q·kᵀ))·v in C++, `[B, H, T, D]`, laid out as `[B, T, H, D]`.

    For the same seed it drops other weights than PyTorch: each is a function of seed, head, query and key alone. With
    the same number of threads, the gradients have the same bits on each run.

    Raises RuntimeError where the kernels can't be compiled.
    """
    heads, visible, options = call
    visible = with_seed(visible, options, heads.q.device)
    arguments = *heads[:3], *visible[:3], *options
    refuse_forward_mode(arguments)
    gradients = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)
    if gradients:
        out: Tensor = build.overload("attention")(*arguments, True)
        return out
    return build.overload("forward")(*arguments, False)[0]


@torch.no_grad()
def head_statistics(heads: Heads, visible: Visible, options: Options, cap: float = 50.0) -> HeadStatistics:
    """`tiled.head_statistics` in C++, in fp32.

    Raises RuntimeError where the kernels can't be compiled.
    """
    # For each query `[B, H, T, 5]`: largest |scale·q·k|, entropy, and numbers of keys; zeros for one without keys
    numbers: Tensor = build.overload("measure")(*heads[:3], *visible[:3], *options, cap)
    largest, entropy, *counts = numbers.unbind(-1)
    seen, over_half, over_cap = (x.sum((0, 2), dtype=torch.float64).to(torch.int64) for x in counts)
    queries = (counts[0] > 0).sum((0, 2)).clamp_min(1)
    top = largest.amax((0, 2)) if largest.numel() else largest.new_zeros(heads.q.shape[1])
    return HeadStatistics(top, entropy.sum((0, 2)) / queries, seen, over_half, over_cap)


def why_not(call: Call) -> str | None:
    """The reason why the kernels do not take a call now, or None. The first call on a machine has them compiled.

    A call of training waits for the compiler, so that its recomputation under checkpointing is the same.
    """
    heads, visible, options = call
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
    return build.why_not(wait=torch.is_grad_enabled() or options.dropout > 0)


def _backward(grad: Tensor, out: Tensor, normaliser: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and the sinks, from `grad` `[B, H, T, D]`, the results of `forward`, and its arguments."""
    q, k, _, _, sinks, *_ = arguments
    *gradients, delta = build.overload("backward")(grad, out, normaliser, *arguments, _key_parts(q, k))
    return *gradients, _sink_gradient(sinks, normaliser, delta)


def _sink_gradient(sinks: Tensor | None, normaliser: Tensor, delta: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    shift, inverse = normaliser.unbind(-1)
    weights = torch.exp(sinks.float()[:, None] - shift).mul_(inverse)
    return weights.masked_fill_(inverse == 0, 0.0).mul_(delta).sum((0, 2)).neg_().to(sinks.dtype)


def _key_parts(q: Tensor, k: Tensor) -> int:
    """The parts of the keys in backward: as many as give each thread several pieces of work, each of 512 keys."""
    places, threads = k.shape[0] * k.shape[1], _threads()
    if places % threads == 0 or places >= 4 * threads:
        return 1
    return max(1, min(-(-4 * threads // places), k.shape[2] // 512))


@constant_in_traces
def _threads() -> int:
    return torch.get_num_threads()


FIELDS: Final = HEADS | dict.fromkeys(Visible._fields[:3], "Tensor?") | OPTIONS | {"gradients": "bool"}


@build.once_loaded
def _add(compiled: build.Overloads) -> build.Overloads:
    """Make the compiled operators traceable, and `forward` differentiable."""
    name = build.name()

    def forward(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        batch, heads, length, _ = q.shape
        return laid_out(q), q.new_empty((batch, heads, length if arguments[-1] else 0, 2), dtype=torch.float32)

    def backward(grad: Tensor, out: Tensor, normaliser: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        q, k, v = arguments[:3]
        return q.new_empty(q.shape), laid_out(k), laid_out(v), normaliser.new_empty(q.shape[:3])

    torch.library.register_fake(f"{name}::forward", forward)
    torch.library.register_fake(f"{name}::backward", backward)
    return {"attention": differentiable(FIELDS, (*HEADS, "sinks"), compiled["forward"], _backward, kept=2)}
