"""Attention in PyTorch, a block of queries at a time, with a backward pass that recomputes: CPU, MPS, any device.

Memory is linear in the sequence length: the largest temporary holds the logits of one block. Half precision is
computed in fp32 and rounded once. e^x is computed as 2^(x·log2 e), a quarter of the time on a CPU; the maximum is
subtracted before, so that the product rounds only what is small.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops.tiled_blocks import Problem
from hf_qknorm.ops.types import Options

LOG2E = math.log2(math.e)

__all__ = ["Options", "Statistics", "backward", "dropout_mask", "forward", "statistics"]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ranges: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Attention output `[B, H, T, D]` (laid out as `[B, T, H, D]`), and the log-sum-exp of the logits `[B, H, T, 2]`.

    Arguments as in `library.attention`. The log-sum-exp is the sum of its two parts, the maximum and the rest: one
    number would round away what the backward pass needs of large logits. For a query without keys it is +inf.
    """
    problem = Problem(q, k, v, mask, ranges, sinks, options)
    out = problem.q.new_zeros(problem.q.shape)
    lse = problem.q.new_full((*problem.q.shape[:3], 2), math.inf)
    buffer, spare = problem.buffer(), problem.buffer()
    for block in problem.blocks:
        logits = problem.logits(block, buffer, spare)
        sink = problem.sink_rows(block)
        largest = logits.amax(-1, keepdim=True)
        empty = problem.empty(block, largest)
        shift = largest.clamp_min(torch.finfo(logits.dtype).min)
        if sink is not None:
            sink = sink.masked_fill(empty, -math.inf)  # an empty row stays empty, even where the sink is NaN
            shift = torch.maximum(shift, sink)
        weights = _exp_(logits.sub_(shift))
        total = weights.sum(-1, keepdim=True)
        total = total if sink is None else total + torch.exp(sink - shift)
        if seed is not None:
            weights.mul_(problem.keep(block, seed))
        rows = torch.bmm(weights, problem.span(problem.v, block))
        problem.put(out, block, rows.div_(total.masked_fill(empty, 1.0)))
        problem.put(lse, block, torch.cat([shift, total.log_().masked_fill_(empty, math.inf)], -1))
    b, h, t, d = q.shape
    laid_out = q.new_empty((b, t, h, d)).copy_(out.view(b, h, t, d).transpose(1, 2))
    return laid_out.transpose(1, 2), lse.view(b, h, t, 2)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ranges: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and the sinks (None without them), for `grad` `[B, H, T, D]`, recomputing the weights."""
    problem = Problem(q, k, v, mask, ranges, sinks, options)
    grads, outs = problem.grouped(grad), problem.grouped(out)
    lses = problem.grouped(lse)
    dq, dk, dv = (x.new_zeros(x.shape) for x in (problem.q, problem.k, problem.v))
    dsinks = None if problem.sinks is None else torch.zeros_like(problem.sinks)
    cap, scale = options.softcap, options.scale
    first, second = problem.buffer(), problem.buffer()
    for block in problem.blocks:
        grad_rows, query_rows = problem.part(grads, block), problem.part(problem.q, block)
        delta = (grad_rows * problem.part(outs, block)).sum(-1, keepdim=True)
        slope = problem.scores(block, scale, first) if cap is None else problem.tanh_scores(block, cap, first, second)
        weights = torch.mul(slope, cap or 1.0, out=second[: slope.numel()].view(slope.shape))
        problem.hide(weights, block)
        largest, rest = problem.part(lses, block).unbind(-1)
        _exp_(weights.sub_(largest[..., None]).sub_(rest[..., None]))  # as forward did: what was rounded there cancels
        keep = None if seed is None else problem.keep(block, seed)
        dropped = weights if keep is None else weights * keep
        problem.span(dv, block).baddbmm_(dropped.transpose(1, 2), grad_rows)
        if cap is None:
            slope.copy_(weights)
        else:  # p·(1 − tanh²)
            torch.addcmul(weights, weights, slope.mul_(slope), value=-1, out=slope)
        torch.bmm(grad_rows, problem.span(problem.v, block).transpose(1, 2), out=weights)
        if keep is not None:
            weights.mul_(keep)
        dlogits = weights.sub_(delta).mul_(slope)
        problem.put(dq, block, torch.bmm(dlogits, problem.span(problem.k, block)))
        problem.span(dk, block).baddbmm_(dlogits.transpose(1, 2), query_rows, alpha=scale)
        sink = problem.sink_rows(block)
        if sink is not None and dsinks is not None:
            flow = torch.exp(sink - (largest + rest)[..., None]).mul_(delta).neg_()
            flow.masked_fill_(rest[..., None] == math.inf, 0.0)
            dsinks += flow.view(-1, problem.heads_kv, problem.group, block.shape[1], 1).sum((0, 3), keepdim=True)[0]
    return (
        dq.mul_(scale).view(q.shape).to(q.dtype),
        dk.view(k.shape).to(k.dtype),
        dv.view(v.shape).to(v.dtype),
        None if dsinks is None or sinks is None else dsinks.view(sinks.shape).to(sinks.dtype),
    )


def dropout_mask(
    q: Tensor, k: Tensor, mask: Tensor | None, ranges: Tensor | None, seed: Tensor, options: Options
) -> Tensor:
    """The mask `[B, H, T, S]` that forward and backward multiply the weights by; 0 for keys that no block reads."""
    problem = Problem(q, k, k, mask, ranges, None, options)
    full = problem.q.new_zeros((*problem.q.shape[:3], problem.keys))
    for block in problem.blocks:
        rows = problem.q.new_zeros((*problem.part(problem.q, block).shape[:2], problem.keys))
        rows[..., block.cols] = problem.keep(block, seed)
        problem.put(full, block, rows)
    return full.view(*q.shape[:3], problem.keys)


class Statistics(NamedTuple):
    """What `statistics` finds, per head `[H]`, over everything that is not masked; the last three are int64 counts."""

    max_logit: Tensor  # the largest |scale·q·k|, before the cap
    entropy: Tensor  # the mean over the queries that attend to anything, in nats
    seen: Tensor  # pairs of a query and a key that it may see
    over_half: Tensor  # of these, those with |scale·q·k| over half the cap
    over_cap: Tensor  # and over the whole of it


def statistics(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    ranges: Tensor | None,
    sinks: Tensor | None,
    options: Options,
    cap: float = 50.0,
) -> Statistics:
    """How large the logits are and how flat the weights, per head, as `Statistics`; no T×S tensor.

    Logits are held against `cap`, which need not be the cap that is applied to them (`options.softcap`).
    """
    problem = Problem(q, k, k, mask, ranges, sinks, options)
    shape = (problem.heads_kv, problem.group)
    largest, entropy = problem.q.new_zeros(shape), problem.q.new_zeros(shape)
    queries, pairs, over_half, over_cap = (entropy.new_zeros(shape, dtype=torch.int64) for _ in range(4))
    buffer, spare = problem.buffer(), problem.buffer()
    for block in problem.blocks:
        b, n, w = block.shape
        raw = problem.scores(block, options.scale, buffer).abs()
        logits = problem.logits(block, buffer, spare)
        seen = problem.seen(block).reshape(logits.shape)
        heads = raw.masked_fill_(~seen, 0.0).view(b, *shape, n * w)
        top = heads.amax((0, 3))
        largest = torch.maximum(largest, top)
        pairs += seen.view(heads.shape).sum((0, 3))
        if not bool(top.max() <= cap / 2):  # mostly there is nothing to count, which takes longer than the maximum
            over_half += (heads > cap / 2).sum((0, 3))
            over_cap += (heads > cap).sum((0, 3))
        seen = seen.any(-1, keepdim=True)
        sink = problem.sink_rows(block)
        logits = logits if sink is None else torch.cat([logits, sink], -1)
        weights = torch.softmax(logits.masked_fill(~seen, 0.0), -1)
        logs = weights.clamp_min(torch.finfo(weights.dtype).tiny).log_()  # 0·log 0 is 0; xlogy takes far longer
        nats = logs.mul_(weights).sum(-1, keepdim=True).neg_().masked_fill_(~seen, 0.0)
        entropy += nats.view(b, *shape, n).sum((0, 3))
        queries += seen.view(b, *shape, n).sum((0, 3))
    entropy /= queries.clamp_min(1)
    return Statistics(*(x.flatten() for x in (largest, entropy, pairs, over_half, over_cap)))


def _exp_(x: Tensor) -> Tensor:
    return x.mul_(LOG2E).exp2_()
