"""Attention in PyTorch, a block of queries at a time, recomputed in backward: memory is linear in the length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops.registration import HEADS, OPTIONS, VISIBLE, Operator, differentiable
from hf_qknorm.ops.types import Heads, Options, Visible, laid_out

ROWS: Final = 64  # queries of a block
LOGITS: Final = 1 << 22  # of a block, at most

FIELDS: Final = HEADS | VISIBLE | OPTIONS
ATTENTION: Final = Operator("attention", FIELDS, "Tensor")
ATTENTION_BACKWARD: Final = Operator("attention_backward", {"grad": "Tensor"} | FIELDS, "Tensor[]")
attention = differentiable(FIELDS, (*HEADS, "sinks", "mask"), ATTENTION, ATTENTION_BACKWARD, kept=0)


@ATTENTION.implement
def _(*arguments: Any) -> Tensor:
    heads, visible, options = Heads(*arguments[:3]), Visible(*arguments[3:7]), Options(*arguments[7:])
    out, inputs = laid_out(heads.q).zero_(), _inputs(heads, visible)
    for block in _blocks(heads, visible, options):
        out[:, :, block.rows] = _attend(_parts(inputs, block), block, options, visible.seed)
    return out


@ATTENTION.fake
def _(q: Tensor, *_: Any) -> Tensor:
    return laid_out(q)


@ATTENTION_BACKWARD.implement
def _(grad: Tensor, *arguments: Any) -> list[Tensor | None]:
    heads, visible, options = Heads(*arguments[:3]), Visible(*arguments[3:7]), Options(*arguments[7:])
    inputs, wide = _inputs(heads, visible), torch.promote_types(heads.q.dtype, torch.float32)
    sums: Any = Inputs(*(x if x is None else torch.zeros_like(x, dtype=wide) for x in inputs))  # type: ignore[arg-type]
    for block in _blocks(heads, visible, options):
        found = _gradients(grad[:, :, block.rows], _parts(inputs, block), block, options, visible.seed)
        for total, x in zip(_parts(sums, block), found, strict=True):
            if total is not None and x is not None:
                total += x
    return [x if x is None else total.to(x.dtype) for total, x in zip(sums, inputs, strict=True)]


@ATTENTION_BACKWARD.fake
def _(grad: Tensor, *arguments: Any) -> list[Tensor | None]:
    inputs = _inputs(Heads(*arguments[:3]), Visible(*arguments[3:7]))
    return [None if x is None else torch.empty_like(x) for x in inputs]


class Block(NamedTuple):
    """The queries `rows`, the keys `near` that any of them sees, and the pairs of these that are `hidden`.

    `hidden` is `[B or 1, H or 1, n, m]`.
    """

    rows: slice
    near: slice
    hidden: Tensor


def _blocks(heads: Heads, visible: Visible, options: Options) -> Iterator[Block]:
    """The blocks of a call whose queries see any key."""
    (q, k, *_), ranges, mask = heads, visible.ranges, visible.mask
    (batch, count, queries, _), keys = q.shape, k.shape[2]
    if not (q.numel() and k.numel()):
        return
    size = max(min(ROWS, LOGITS // (batch * count * keys)), 16)
    for start in range(0, queries, size):
        rows = slice(start, min(start + size, queries))
        near = _near(rows, queries, keys, options)
        bounds = None if ranges is None else ranges[:, rows].clamp(near.start, near.stop)
        if bounds is not None:  # read on the host: a packed sequence then costs its own length
            seen = bounds[bounds[..., 0] < bounds[..., 1]]
            near = slice(int(seen[:, 0].amin()), int(seen[:, 1].amax())) if len(seen) else slice(0, 0)
        if near.start < near.stop:
            yield Block(rows, near, _hidden(rows, near, queries, keys, bounds, mask, options, q.device))


def _near(rows: slice, queries: int, keys: int, options: Options) -> slice:
    """The keys that queries may see through causality and window."""
    first, last, window = rows.start + keys - queries, rows.stop + keys - queries, options.window
    low = 0 if window is None else min(max(first - window, 0), keys)
    high = last if options.causal else keys if window is None else last + window
    return slice(low, max(min(high, keys), low))


def _hidden(
    rows: slice, near: slice, queries: int, keys: int, bounds: Tensor | None, mask: Tensor | None, options: Options,
    device: torch.device,
) -> Tensor:  # fmt: skip
    own = torch.arange(rows.start, rows.stop, device=device)[:, None] + keys - queries
    key = torch.arange(near.start, near.stop, device=device)
    hidden = (key > own if options.causal else torch.zeros_like(key > own))[None, None]
    if options.window is not None:
        far = own - key >= options.window if options.causal else (own - key).abs() > options.window
        hidden = hidden | far
    if bounds is not None:
        begin, end = bounds[:, None, :, None].unbind(-1)
        hidden = hidden | (key < begin) | (key >= end)
    if mask is not None:
        here = _part_of_mask(mask, rows, near)
        hidden = hidden | (~here if here.dtype == torch.bool else here <= torch.finfo(here.dtype).min)
    return hidden


def _part_of_mask(mask: Tensor, rows: slice, near: slice) -> Tensor:
    """The part of a mask `[B or 1, H or 1, T or 1, S or 1]`, which is not repeated where it has one row or key."""
    part = mask if mask.shape[2] == 1 else mask[:, :, rows]
    return part if part.shape[3] == 1 else part[..., near]


class Inputs(NamedTuple):
    """The tensors with gradients; `bias` is an additive mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    bias: Tensor | None


def _inputs(heads: Heads, visible: Visible) -> Inputs:
    mask = visible.mask
    return Inputs(*heads[:3], visible.sinks, None if mask is None or mask.dtype == torch.bool else mask)


def _parts(inputs: Inputs, block: Block) -> Inputs:
    """The inputs of a block, or the sums of its gradients."""
    (q, k, v, sinks, bias), rows, near = inputs, block.rows, block.near
    bias = None if bias is None else _part_of_mask(bias, rows, near)
    return Inputs(q[:, :, rows], k[:, :, near], v[:, :, near], sinks, bias)


def _attend(inputs: Inputs, block: Block, options: Options, seed: Tensor | None) -> Tensor:
    """Attention of a block, `[B, H, n, D]`."""
    weights, _ = _weights(inputs, block, options)
    if options.dropout:
        weights = weights * dropout_factors(weights, block.rows.start, seed, options.dropout)
    out = _matmul(_by_group(weights, inputs.k), inputs.v.to(weights.dtype))
    return out.view(inputs.q.shape).to(inputs.q.dtype)


def _gradients(grad: Tensor, inputs: Inputs, block: Block, options: Options, seed: Tensor | None) -> Inputs:
    """The gradients of a block's inputs, from that of its output `[B, H, n, D]`."""
    q, k, v, sinks, bias = inputs
    weights, sunk = _weights(inputs, block, options)
    grad, wide = _by_group(grad.to(weights.dtype), k), weights.dtype
    dweights, kept = _matmul(grad, v.to(wide).mT).view(weights.shape), weights
    if options.dropout:
        factors = dropout_factors(weights, block.rows.start, seed, options.dropout)
        dweights, kept = dweights * factors, weights * factors
    delta = (weights * dweights).sum(-1)
    dlogits = weights * (dweights - delta[..., None])
    dbias = None if bias is None else dlogits.sum_to_size(bias.shape)
    if (cap := options.softcap) is not None:
        slope = 1 - torch.tanh(_products(q, k, options.scale) / cap).square()
        dlogits = (dlogits * slope).masked_fill(block.hidden, 0.0)  # where a hidden logit may be no number
    dlogits = _by_group(dlogits * options.scale, k)
    dq, dk = _matmul(dlogits, k.to(wide)).view(q.shape), _matmul(dlogits.mT, _by_group(q.to(wide), k))
    dsinks = None if sinks is None else -(sunk * delta).sum((0, 2))
    return Inputs(dq, dk, _matmul(_by_group(kept, k).mT, grad), dsinks, dbias)


def dropout_factors(weights: Tensor, row: int, seed: Tensor | None, rate: float) -> Tensor:
    """0 for dropped weights `[B, H, n, m]` and 1/(1 − rate) for others, by the seed and the block's first row."""
    assert seed is not None
    generator = torch.Generator(weights.device).manual_seed(int(seed) + row)
    kept = torch.rand(weights.shape, generator=generator, device=weights.device) >= rate
    return kept.to(weights.dtype) / (1 - rate)


def _weights(inputs: Inputs, block: Block, options: Options) -> tuple[Tensor, Tensor]:
    """The weights `[B, H, n, m]`, and those of the sinks `[B, H, n]`; of a query that sees no key, 0."""
    empty = block.hidden.all(-1, keepdim=True)
    logits = _logits(inputs, block, options).masked_fill(empty, 0.0)
    weights = torch.softmax(_with_sinks(logits, inputs.sinks), -1).masked_fill(empty, 0.0)
    return weights[..., : logits.shape[-1]], weights[..., -1]


def _logits(inputs: Inputs, block: Block, options: Options) -> Tensor:
    """cap(scale·q·kᵀ) + bias, `[B, H, n, m]`, −∞ for hidden pairs."""
    logits = _products(inputs.q, inputs.k, options.scale)
    if (cap := options.softcap) is not None:
        logits = torch.tanh(logits / cap) * cap
    return (logits if inputs.bias is None else logits + inputs.bias).masked_fill(block.hidden, -math.inf)


def _products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale·q·kᵀ in fp32 at least, `[B, H, n, m]`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return (_matmul(_by_group(q.to(wide), k), k.to(wide).mT) * scale).view(*q.shape[:3], -1)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a·b in its dtype: autocast would round fp32."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    """`[B, H, n, m]` as `[B, Hk, H/Hk·n, m]`: the queries of a group's heads are rows of one product."""
    return x.reshape(*k.shape[:2], -1, x.shape[-1])


def _with_sinks(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """The logits, and behind them each head's sink."""
    if sinks is None:
        return logits
    return torch.cat([logits, sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)], -1)


class HeadStatistics(NamedTuple):
    """The logits of each head, `[H]`, over all keys that are not masked; the last three are int64 counts."""

    max_logit: Tensor  # the largest |scale·q·k|, before the cap
    entropy: Tensor  # the mean over the queries that see any key, in nats
    seen: Tensor  # pairs of a query and a key that it sees
    over_half: Tensor  # the pairs with |scale·q·k| over half the cap
    over_cap: Tensor  # the pairs with |scale·q·k| over the cap


@torch.no_grad()
def head_statistics(heads: Heads, visible: Visible, options: Options, cap: float = 50.0) -> HeadStatistics:
    """Measure the logits of each head in linear memory, and compare them with `cap`; the values are not read."""
    largest, *sums = (heads.q.new_zeros(heads.q.shape[1], dtype=torch.float64) for _ in range(6))
    inputs = _inputs(heads, visible)
    for block in _blocks(heads, visible, options):
        part = _parts(inputs, block)
        logits = _with_sinks(_logits(part, block, options), part.sinks)
        rows = (~block.hidden).any(-1).expand(logits.shape[:3])
        nats = torch.special.entr(torch.softmax(logits, -1)).sum(-1).where(rows, 0.0)
        seen = (~block.hidden).sum(-1).expand(logits.shape[:3])
        sizes = _products(part.q, part.k, options.scale).abs_().masked_fill_(block.hidden, 0.0)
        found = (nats, rows, seen, (sizes > cap / 2).sum(-1), (sizes > cap).sum(-1))
        sums = [total + x.sum((0, 2)) for total, x in zip(sums, found, strict=True)]
        largest = torch.maximum(largest, sizes.amax((0, 2, 3)))
    nats, rows, *counts = sums
    wide = torch.promote_types(heads.q.dtype, torch.float32)
    entropy = nats / rows.clamp_min(1)
    return HeadStatistics(largest.to(wide), entropy.to(wide), *(x.to(torch.int64) for x in counts))


@torch.no_grad()
def largest_logits(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """The largest logit of each head over the keys that its queries see, `[H]`; −∞ without any."""
    largest = heads.q.new_full((heads.q.shape[1],), -math.inf, dtype=torch.float32)
    inputs = _inputs(heads, visible)
    for block in _blocks(heads, visible, options):
        logits = _logits(_parts(inputs, block), block, options)
        largest = torch.maximum(largest, logits.amax((0, 2, 3)).float())
    return largest
