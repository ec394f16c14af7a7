"""Calls of the C++ kernels, and the tensors of their results."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.types import Heads, Options, Visible, laid_out


def forward(heads: Heads, visible: Visible, options: Options) -> tuple[Tensor, Tensor]:
    """Attention output `[B, H, T, D]` (laid out as `[B, T, H, D]`), and the normaliser `[B, H, T, 2]`.

    A weight is e^(logit - first)·second of the normaliser; the second is 0 for a query without keys.
    """
    out = laid_out(heads.q)
    normaliser = heads.q.new_empty((*heads.q.shape[:3], 2), dtype=torch.float32)
    build.operators().forward(*_call(heads, visible, options), out, normaliser)
    return out, normaliser


def backward(
    grad: Tensor, heads: Heads, visible: Visible, options: Options, out: Tensor, normaliser: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and the sinks, from `grad` `[B, H, T, D]` and the results of `forward`."""
    q, k, v = heads[:3]
    normaliser = normaliser.contiguous()
    dq = q.new_zeros((_key_parts(q, k), *q.shape), dtype=torch.float32)
    dk, dv, delta = laid_out(k), laid_out(v), normaliser.new_empty(q.shape[:3])
    results = _dense(grad), _dense(out), normaliser
    build.operators().backward(*_call(heads, visible, options), *results, dq, dk, dv, delta)
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


def _call(heads: Heads, visible: Visible, options: Options) -> tuple[object, ...]:
    """The arguments of both operators."""
    ranges, sinks, seed, _ = visible
    ranges = None if ranges is None else ranges.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    return *map(_dense, heads[:3]), ranges, sinks, seed, *options


def _dense(x: Tensor) -> Tensor:
    """The same heads, with rows without gaps."""
    return x if x.stride(3) == 1 else x.contiguous()
