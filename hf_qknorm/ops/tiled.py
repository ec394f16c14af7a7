"""Attention in PyTorch, a block of queries at a time, with a backward pass that recomputes: CPU, MPS, any device.

Memory is linear in the sequence length: the largest temporary holds the logits of one block. Half precision is
computed in fp32 and rounded once. e^x is computed as 2^(x·log2 e), a quarter of the time on a CPU; the maximum is
subtracted first, so that the product rounds small numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops import threads
from hf_qknorm.ops.tiled_blocks import Problem, Share, shares
from hf_qknorm.ops.types import Heads, Options, Visible, laid_out

LOG2E = math.log2(math.e)


def forward(heads: Heads, visible: Visible, options: Options) -> tuple[Tensor, Tensor]:
    """Attention output `[B, H, T, D]` (laid out as `[B, T, H, D]`), and the log-sum-exp of the logits `[B, H, T, 2]`.

    The log-sum-exp is the sum of its two parts, the maximum and the rest: one number would round away digits of large
    logits that the backward pass needs. For a query without keys it is +inf.
    """
    q = heads.q
    results = laid_out(q), q.new_empty((*q.shape[:3], 2), dtype=torch.promote_types(q.dtype, torch.float32))

    def attend_share(share: Share) -> None:
        found = _forward(Problem(heads, visible, options, share))
        _write(results, found, share, heads.k.shape[1])

    threads.run([partial(attend_share, share) for share in shares(heads)], q.device)
    return results


def _forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output `[B·Hk, G, T, D]` and log-sum-exp `[B·Hk, G, T, 2]` of a problem."""
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
        keep = problem.keep(block)
        weights = weights if keep is None else weights.mul_(keep)
        rows = torch.bmm(weights, problem.span(problem.v, block))
        problem.put(out, block, rows.div_(total.masked_fill(empty, 1.0)))
        problem.put(lse, block, torch.cat([shift, total.log_().masked_fill_(empty, math.inf)], -1))
    return out, lse


def backward(
    heads: Heads, visible: Visible, options: Options, grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and the sinks, from `grad` `[B, H, T, D]` and the results of `forward`."""
    (q, k, v, *_), sinks, parts = heads, visible.sinks, shares(heads)
    results = tuple(x.new_empty(x.shape) for x in (q, k, v))
    # Each share's part of the sinks' gradient has a row of its own: a batch that is shared out is added up in order.
    dsinks = lse.new_zeros((len(parts), q.shape[1]))

    def differentiate(number: int, share: Share) -> None:
        problem = Problem(heads, visible, options, share)
        given = [problem.grouped(share.of(x, k.shape[1])) for x in (grad, out, lse)]
        *found, flow = _backward(problem, *given)
        _write(results, found, share, k.shape[1])
        if flow is not None:
            share.of(dsinks[None, number], k.shape[1]).copy_(flow.view(1, -1))

    threads.run([partial(differentiate, *numbered) for numbered in enumerate(parts)], q.device)
    dq, dk, dv = results
    return dq, dk, dv, None if sinks is None else dsinks.sum(0).to(sinks.dtype)


def _backward(
    problem: Problem, grads: Tensor, outs: Tensor, lses: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of a problem's q, k, v and sinks, from gradients and results in the layout of q."""
    dq, dk, dv = (x.new_zeros(x.shape) for x in (problem.q, problem.k, problem.v))
    dsinks = None if problem.sinks is None else torch.zeros_like(problem.sinks)
    scale, cap = problem.options[:2]
    first, second = problem.buffer(), problem.buffer()
    for block in problem.blocks:
        grad_rows, query_rows = problem.part(grads, block), problem.part(problem.q, block)
        delta = (grad_rows * problem.part(outs, block)).sum(-1, keepdim=True)
        slope = problem.scores(block, scale, first) if cap is None else problem.tanh_scores(block, cap, first, second)
        weights = torch.mul(slope, cap or 1.0, out=second[: slope.numel()].view(slope.shape))
        problem.hide(weights, block)
        largest, rest = problem.part(lses, block).unbind(-1)
        _exp_(weights.sub_(largest[..., None]).sub_(rest[..., None]))  # rounded as in forward, so that it cancels
        keep = problem.keep(block)
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
    return dq.mul_(scale), dk, dv, dsinks


def _write(results: Sequence[Tensor], found: Sequence[Tensor], share: Share, heads_kv: int) -> None:
    """Write a share's results `[B·Hk, ...]` to their places in the call's results, `[B, H, ...]`."""
    for whole, part in zip(results, found, strict=True):
        place = share.of(whole, heads_kv)
        place.copy_(part.view(place.shape))


class HeadStatistics(NamedTuple):
    """The logits of each head, `[H]`, over all keys that are not masked; the last three are int64 counts."""

    max_logit: Tensor  # the largest |scale·q·k|, before the cap
    entropy: Tensor  # the mean over the queries that see any key, in nats
    seen: Tensor  # pairs of a query and a key that it sees
    over_half: Tensor  # the pairs with |scale·q·k| over half the cap
    over_cap: Tensor  # the pairs with |scale·q·k| over the cap


def head_statistics(heads: Heads, visible: Visible, options: Options, cap: float = 50.0) -> HeadStatistics:
    """Measure the logits of each head, without a T×S tensor; the values are not read.

    Logits are compared with `cap`, which need not be the cap that is applied to them (`options.softcap`).
    """
    problem = Problem(heads, visible, options)
    shape = (problem.heads_kv, problem.group)
    largest, entropy = problem.q.new_zeros(shape), problem.q.new_zeros(shape)
    queries, pairs, over_half, over_cap = (entropy.new_zeros(shape, dtype=torch.int64) for _ in range(4))
    buffer, spare = problem.buffer(), problem.buffer()
    for block in problem.blocks:
        b, n, w = block.shape
        raw = problem.scores(block, options.scale, buffer).abs()
        logits = problem.logits(block, buffer, spare)
        seen = problem.seen(block).reshape(logits.shape)
        sizes = raw.masked_fill_(~seen, 0.0).view(b, *shape, n * w)
        top = sizes.amax((0, 3))
        largest = torch.maximum(largest, top)
        pairs += seen.view(sizes.shape).sum((0, 3))
        if not bool(top.max() <= cap / 2):  # counting takes longer than the maximum, and mostly finds nothing
            over_half += (sizes > cap / 2).sum((0, 3))
            over_cap += (sizes > cap).sum((0, 3))
        seen = seen.any(-1, keepdim=True)
        sink = problem.sink_rows(block)
        logits = logits if sink is None else torch.cat([logits, sink], -1)
        weights = torch.softmax(logits.masked_fill(~seen, 0.0), -1)
        logs = weights.clamp_min(torch.finfo(weights.dtype).tiny).log_()  # 0·log 0 is 0; xlogy takes far longer
        nats = logs.mul_(weights).sum(-1, keepdim=True).neg_().masked_fill_(~seen, 0.0)
        entropy += nats.view(b, *shape, n).sum((0, 3))
        queries += seen.view(b, *shape, n).sum((0, 3))
    entropy /= queries.clamp_min(1)
    return HeadStatistics(*(x.flatten() for x in (largest, entropy, pairs, over_half, over_cap)))


def _exp_(x: Tensor) -> Tensor:
    return x.mul_(LOG2E).exp2_()
