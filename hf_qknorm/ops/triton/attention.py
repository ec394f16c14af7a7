"""Fused attention on the host: prologue and kernels in their order, forward and backward, buffers and constants."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops.triton import attention_decode, gluon, norm_rope
from hf_qknorm.ops.triton.arguments import norm_arguments, norm_kind, rotary_arguments, sum_to
from hf_qknorm.ops.triton.attention_backward import ALIGNED, key_kernel, query_kernel, sums_kernel
from hf_qknorm.ops.triton.attention_forward import forward_kernel
from hf_qknorm.ops.triton.launch import (
    FORWARD,
    KEY_GRADIENT,
    LOG2E,
    QUERY_GRADIENT,
    Tile,
    dense,
    descriptor,
    gradient_loops,
    launch,
    loops,
    padded,
    precision,
    reach,
    tile,
    units,
)
from hf_qknorm.ops.types import Heads, Norm, Options, Visible, laid_out


class Result(NamedTuple):
    """Output `[B, H, T, D]` laid out as `[B, T, H, D]`, and its normaliser `[B, H, T, 2]`: peak and total.

    A weight is 2^(logit − peak) / total, of logits in units of log2; the peak is the largest one, or 0 where logits are
    bounded. Of each query's logits, if wanted: the largest |scale·q·k| before the cap and the entropy, in nats.
    """

    out: Tensor
    normaliser: Tensor
    largest: Tensor | None
    entropy: Tensor | None


class Ready(NamedTuple):
    """Heads as kernels take them: a score is q·k, times `unit` if that is not 1; `cap` makes logits of scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    bound: Tensor | None
    unit: float
    cap: float
    scaled: bool

    @classmethod
    def of(cls, heads: Heads, options: Options) -> Ready:
        v = dense(heads.v)
        unit, cap, scaled = units(options.scale, options.softcap)
        if not heads.raw:
            return cls(dense(heads.q), dense(heads.k), v, None, unit, cap, scaled)
        before, after = (unit, cap) if scaled else (cap, 1.0)
        made = norm_rope.forward(heads.q, heads.k, heads.q_norm, heads.k_norm, heads.rotary, before)
        assert made.k is not None
        return cls(made.q, made.k, v, made.bound, 1.0, after, False)


def forward(heads: Heads, visible: Visible, options: Options, statistics: bool = False) -> Result:
    """Attention over raw or ready heads; see `library.fused_attention`."""
    if not heads.raw and not statistics and not options.dropout and attention_decode.suits(heads.q, heads.k):
        return Result(*attention_decode.forward(heads.q, heads.k, heads.v, visible, options), None, None)
    ready = Ready.of(heads, options)
    (b, h, t, _), device = heads.q.shape, heads.q.device
    out = laid_out(heads.q)
    normaliser = heads.q.new_empty(b, h, t, 2, dtype=torch.float32)
    largest, entropy = (normaliser.new_empty(b, h, t) for _ in range(2)) if statistics else (None, None)
    shape = tile(FORWARD, heads.q)
    warped = gluon.serves(heads.q, visible, options, statistics)
    for loop in loops(heads.q.dtype, options.softcap, ready.bound is not None, visible.sinks is not None):
        if warped:
            gluon.attend(ready, out, normaliser, options.causal, loop)
            continue
        launch(
            forward_kernel,
            (-(-t // shape.queries) * b * h,),
            device,
            descriptor(ready.q, shape.queries),
            descriptor(ready.k, shape.keys),
            descriptor(ready.v, shape.keys),
            descriptor(out, shape.queries),
            normaliser,
            ready.bound,
            visible.ranges,
            visible.sinks,
            visible.seed,
            largest,
            entropy,
            ready.unit,
            ready.cap,
            options.dropout,
            loop.limit,
            h,
            heads.k.shape[1],
            t,
            heads.k.shape[2],
            reach(options.window, t, heads.k.shape[2]),
            TANH=loop.tanh,
            ONLINE=loop.online,
            WHEN=loop.when,
            SINKS=visible.sinks is not None,
            STATISTICS=statistics,
            **_constants(heads, visible, options, ready, shape),
        )
    if largest is not None and entropy is not None:
        largest *= ready.cap / LOG2E if options.softcap is None else options.softcap
        entropy /= LOG2E
    return Result(out, normaliser, largest, entropy)


def _constants(heads: Heads, visible: Visible, options: Options, ready: Ready, shape: Tile) -> dict[str, Any]:
    """What all attention kernels are compiled for."""
    return {
        "BLOCK_M": shape.queries,
        "BLOCK_N": shape.keys,
        "PADDED": padded(heads.q.shape[-1]),
        "CAUSAL": options.causal,
        "WINDOW": options.window is not None,
        "RANGES": visible.ranges is not None,
        "SCALED": ready.scaled,
        "DROPOUT": options.dropout > 0,
        "PRECISION": precision(heads.q.dtype),
        "num_warps": shape.warps,
        "num_stages": shape.stages,
    }


class Gradients(NamedTuple):
    """Gradients of raw q, k, v, of the norms' gains and biases, and of the sinks, where there are such."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_gain: Tensor | None
    q_bias: Tensor | None
    k_gain: Tensor | None
    k_bias: Tensor | None
    sinks: Tensor | None


def backward(
    grad: Tensor, heads: Heads, visible: Visible, options: Options, out: Tensor, normaliser: Tensor
) -> Gradients:
    """Gradients for `grad` `[B, H, T, D]`, from raw heads, output and normaliser alone; the same bits on each run."""
    ready = Ready.of(heads, options)
    grad = dense(grad)
    sums = _sums(grad, dense(out), normaliser)
    # what is left of the chain rule: in q·unit·k, of q and of k
    softcap, scale = options.softcap, options.scale
    outer_k = scale if not heads.raw else (softcap or 1 / LOG2E)
    ends = heads if _ends_in_kernel(heads) else heads._replace(q_norm=Norm(), k_norm=Norm(), rotary=None)
    dtype = heads.q.dtype if ends is heads else torch.float32
    dq, dk, dv = laid_out(heads.q, dtype), laid_out(heads.k, dtype), laid_out(heads.v)
    queries, keys = tile(QUERY_GRADIENT, heads.q), tile(KEY_GRADIENT, heads.q)
    ranges = None if visible.ranges is None else _queries_seeing(visible.ranges, heads.k.shape[2])
    q_side = _Side(query_kernel, queries, queries.queries, ends.q, ends.q_norm, scale, visible.ranges, (dq,))
    k_side = _Side(key_kernel, keys, keys.keys, ends.k, ends.k_norm, outer_k, ranges, (dk, dv))
    given = (grad, sums, ends, visible, options, ready)
    (q_gain, q_bias), (k_gain, k_bias) = q_side.fill(*given), k_side.fill(*given)
    dsinks = None
    if visible.sinks is not None:
        peak, total = normaliser.unbind(-1)
        weight = torch.exp2(visible.sinks.float()[:, None] * LOG2E - peak) / total
        flow = (weight * sums[:, :, 1, : total.shape[2]]).masked_fill(total == 0, 0.0)
        dsinks = -flow.sum((0, 2)).to(visible.sinks.dtype)
    if ends is not heads:
        undone = norm_rope.backward(dq, dk, heads.q, heads.k, heads.q_norm, heads.k_norm, heads.rotary)
        assert undone.k is not None
        dq, dk, q_gain, q_bias, k_gain, k_bias = undone.q, undone.k, *undone[2:]
    return Gradients(dq, dk, dv, q_gain, q_bias, k_gain, k_bias, dsinks)


def _sums(grad: Tensor, out: Tensor, normaliser: Tensor) -> Tensor:
    """What backward needs of each row, as `sums_kernel` leaves it."""
    (b, h, t, d), rows = out.shape, 64
    stride = -(-t // ALIGNED.value) * ALIGNED.value
    sums = normaliser.new_empty(b, h, 3, stride)
    launch(
        sums_kernel,
        (stride // rows * b * h,),
        grad.device,
        descriptor(out, rows),
        descriptor(grad, rows),
        normaliser,
        sums,
        h,
        t,
        BLOCK_M=rows,
        PADDED=padded(d),
        EXACT=out.dtype == torch.float32,
        num_warps=4,
    )
    return sums


def _ends_in_kernel(heads: Heads) -> bool:
    """Whether the kernels themselves undo norm and RoPE, in registers; a launch of its own does so for other heads."""
    d, rotary = heads.q.shape[-1], heads.rotary
    whole = rotary is None or (2 * rotary.cos.shape[-1] == d and not rotary.interleaved)
    return not heads.raw or (d == padded(d) and d <= 128 and whole)


class _Side(NamedTuple):
    """Queries or keys: the kernel of their gradient, and what it is given that the other is not."""

    kernel: Any
    shape: Tile
    rows: int  # of a program
    raw: Tensor
    norm: Norm
    outer: float
    ranges: Tensor | None
    outputs: tuple[Tensor, ...]

    def fill(
        self, grad: Tensor, sums: Tensor, heads: Heads, visible: Visible, options: Options, ready: Ready
    ) -> tuple[Tensor | None, Tensor | None]:
        """Write the outputs; returns the gradients of gain and bias."""
        (b, h, t, d), hk, s = heads.q.shape, heads.k.shape[1], heads.k.shape[2]
        shape, norm, count = self.shape, self.norm, self.raw.shape[1]
        blocks = -(-self.raw.shape[2] // self.rows)
        dgain, dbias = (
            None if value is None or norm.kind == "none" else sums.new_empty(b, count, blocks, padded(d))
            for value in (norm.gain, norm.bias)
        )
        raw = None if norm.kind == "none" else descriptor(dense(self.raw), self.rows)
        for loop in gradient_loops(heads.q.dtype, options.softcap, ready.bound is not None, visible.sinks is not None):
            launch(
                self.kernel,
                (blocks * b * count,),
                grad.device,
                descriptor(ready.q, shape.queries),
                descriptor(ready.k, shape.keys),
                descriptor(ready.v, shape.keys),
                descriptor(grad, shape.queries),
                raw,
                *(descriptor(x, self.rows) for x in self.outputs),
                sums,
                ready.bound,
                self.ranges,
                visible.seed,
                (*norm_arguments(norm), dgain, dbias),
                rotary_arguments(heads.rotary),
                ready.unit,
                ready.cap,
                self.outer,
                options.dropout,
                loop.limit,
                h,
                hk,
                t,
                s,
                reach(options.window, t, s),
                TANH=loop.tanh,
                WHEN=loop.when,
                EXACT=heads.q.dtype == torch.float32,
                NORM=norm_kind(norm),
                ROTATED=heads.rotary is not None,
                **_constants(heads, visible, options, ready, shape),
            )
        of_heads = (None if part is None else part.sum(2)[..., :d] for part in (dgain, dbias))
        gain, bias = (sum_to(part, value) for part, value in zip(of_heads, (norm.gain, norm.bias), strict=True))
        return gain, bias


def _queries_seeing(ranges: Tensor, keys: int) -> Tensor:
    """The range of queries that see each key, `[B, S, 2]`, for ranges of keys `[B, T, 2]` that never go back."""
    places = torch.arange(keys, device=ranges.device, dtype=ranges.dtype).expand(ranges.shape[0], -1).contiguous()
    start, stop = (x.contiguous() for x in ranges.unbind(-1))
    first, last = (torch.searchsorted(x, places, right=True, out_int32=True) for x in (stop, start))
    return torch.stack([first, last], -1)
