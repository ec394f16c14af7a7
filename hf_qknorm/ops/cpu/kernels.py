"""Calls of the C++ kernels, and the tensors of their results."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.types import Heads, Options, Visible, laid_out


def attend(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """Attention output `[B, H, T, D]` alone, laid out as `[B, T, H, D]`; faster than `forward` for a few queries."""
    result: Tensor = build.overload("attend")(*heads[:3], *visible[:3], *options)
    return result


def forward(heads: Heads, visible: Visible, options: Options) -> tuple[Tensor, Tensor]:
    """Attention output `[B, H, T, D]` (laid out as `[B, T, H, D]`), and the normaliser `[B, H, T, 2]`.

    A weight is e^(logit - first)·second of the normaliser; the second is 0 for a query without keys.
    """
    results: tuple[Tensor, Tensor] = build.operators().forward(*heads[:3], *visible[:3], *options)
    return results


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


def measure(heads: Heads, visible: Visible, options: Options, threshold: float) -> Tensor:
    """Five numbers of the logits of each query, `[B, H, T, 5]` in fp32; zeros for a query without keys.

    They are the largest |scale·q·k|, the entropy of the weights in nats, the keys that it sees, and of these the ones
    with |scale·q·k| over half the threshold and over the threshold.
    """
    result: Tensor = build.operators().measure(*heads[:3], *visible[:3], *options, threshold)
    return result


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
