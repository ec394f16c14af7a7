"""Fused attention on the host: the kernels of forward and backward, their buffers, arguments and constants."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops.triton import attention_decode, gluon, norm_rope, schedule, shared_blocks
from hf_qknorm.ops.triton.architectures import Tile
from hf_qknorm.ops.triton.arguments import Constants, ScoreArguments, ranges_of_queries
from hf_qknorm.ops.triton.attention_backward import (
    ALIGNED,
    key_gradient_kernel,
    query_gradient_kernel,
    row_terms_kernel,
)
from hf_qknorm.ops.triton.attention_forward import forward_kernel
from hf_qknorm.ops.triton.launch import (
    LOG2E,
    LoopVariant,
    as_tiles,
    backward_variants,
    columns,
    dense,
    dropout_numbers,
    forward_variants,
    head_arguments,
    launch,
    padded,
    precision,
    reach,
    tiles,
    uses_pointers,
)
from hf_qknorm.ops.triton.norm_rope import PreparedHeads
from hf_qknorm.ops.triton.shared_blocks import RawGradient
from hf_qknorm.ops.types import Heads, Norm, Options, Visible, laid_out


class Result(NamedTuple):
    """Output `[B, H, T, D]` laid out as `[B, T, H, D]`, and its normaliser `[B, H, T, 2]`: peak and total.

    A weight is 2^(logit − peak) / total, of logits in units of log2; the peak is the largest logit, or 0 where logits
    are bounded. With statistics, for each query: the largest |scale·q·k| before the cap, and the entropy in nats.
    """

    out: Tensor
    normaliser: Tensor
    largest: Tensor | None
    entropy: Tensor | None


def forward(heads: Heads, visible: Visible, options: Options, statistics: bool = False) -> Result:
    """Attention over heads, with their norms and RoPE; see `library.fused_attention`."""
    if not heads.raw and not statistics and not options.dropout and attention_decode.suits(heads.q, heads.k):
        return Result(*attention_decode.forward(heads.q, heads.k, heads.v, visible, options), None, None)
    prepared = PreparedHeads.of(heads, options)
    b, h, t, _ = heads.q.shape
    out = laid_out(heads.q)
    normaliser = heads.q.new_empty(b, h, t, 2, dtype=torch.float32)
    largest, entropy = (normaliser.new_empty(b, h, t) for _ in range(2)) if statistics else (None, None)
    sinks, bounded = visible.sinks is not None, prepared.bound is not None
    variants = forward_variants(heads.q.dtype, options.softcap, bounded, sinks)
    if gluon.serves(heads.q, visible, options, statistics):
        gluon.run(prepared, out, normaliser, options.causal, variants)
    else:
        call = _Call(prepared, visible, options)
        _forward(call, variants, out, normaliser, largest_out=largest, entropy_out=entropy)
    if largest is not None and entropy is not None:
        largest *= prepared.cap / LOG2E if options.softcap is None else options.softcap
        entropy /= LOG2E
    return Result(out, normaliser, largest, entropy)


class _Call(NamedTuple):
    """The inputs of every kernel of a call."""

    prepared: PreparedHeads
    visible: Visible
    options: Options


def _forward(
    call: _Call, variants: list[LoopVariant], out: Tensor, normaliser: Tensor, **statistics: Tensor | None
) -> None:
    """Write out `[B, H, T, D]`, normaliser and statistics. Several programs share a block, but not with statistics."""
    (q, k, *_), visible, options = call
    (b, h, t, d), shape = q.shape, tiles(q, options.dropout > 0).forward
    division = schedule.of_queries(q, k, shape, options)
    wanted = statistics["largest_out"] is not None
    if wanted:
        division = schedule.Division(1, schedule.query_section(k, h, t, shape.queries))
    shared = division.parts > 1
    results, normalisers = out, normaliser
    if shared:
        results = normaliser.new_empty(b, h * division.parts, t, d)
        normalisers = normaliser.new_empty(b, h * division.parts, t, 2)
    _launch(
        forward_kernel,
        division.parts * -(-t // shape.queries) * b * h,
        call,
        shape,
        variants,
        {"SINKS": visible.sinks is not None, "STATISTICS": wanted},
        **division._asdict(),
        **head_arguments(shape, shape.queries, OUT=results),
        normaliser=normalisers,
        ranges=visible.ranges,
        sinks=visible.sinks,
        **statistics,
    )
    if shared:
        shared_blocks.combine(results, normalisers, out, normaliser)


def _launch(
    kernel: Any,
    programs: int,
    call: _Call,
    shape: Tile,
    variants: list[LoopVariant],
    constants: dict[str, Any],
    **arguments: Any,
) -> None:
    """Launch an attention kernel with the loops of one or two variants; `constants` and `arguments` are its own."""
    prepared, visible, options = call
    (h, t), (hk, s) = prepared.q.shape[1:3], prepared.k.shape[1:3]
    arguments |= shape.launch_options
    arguments |= head_arguments(shape, shape.queries, Q=prepared.q)
    arguments |= head_arguments(shape, shape.keys, K=prepared.k, V=prepared.v)
    arguments |= {
        "bound": prepared.bound,
        "seeds": visible.seed,
        "heads": h,
        "heads_kv": hk,
        "queries": t,
        "keys": s,
        "window": reach(options.window, t, s),
    }
    head_dim = prepared.q.shape[-1]
    width, rest = columns(head_dim, shape)
    shared = Constants(
        shape.queries,
        shape.keys,
        width,
        head_dim,
        rest,
        POINTERS=uses_pointers(prepared.q.device),
        CAUSAL=options.causal,
        WINDOW=options.window is not None,
        RANGES=visible.ranges is not None,
        SCALED=prepared.scaled,
        DROPOUT=options.dropout > 0,
        PRECISION=precision(prepared.q.dtype),
        **constants,
    )
    arguments["score"] = ScoreArguments(
        prepared.unit, prepared.cap, variants[0].limit, *dropout_numbers(options.dropout)
    )
    for name, (tanh, online, when, _) in zip(("C", "BEYOND"), variants, strict=False):
        arguments[name] = shared._replace(TANH=tanh, ONLINE=online, WHEN=when)
    launch(kernel, (programs,), prepared.q.device, **arguments)


class Gradients(NamedTuple):
    """Gradients of raw q, k, v, of the norms' gains and biases, and of the sinks; None for absent ones."""

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
    prepared = PreparedHeads.of(heads, options)
    grad = dense(grad)
    row_terms = _row_terms(grad, dense(out), normaliser)
    in_kernel = _kernels_undo_norm(heads)
    inner = heads if in_kernel else heads._replace(q_norm=Norm(), k_norm=Norm(), rotary=None)
    dtype = heads.q.dtype if in_kernel else torch.float32
    dq, dk, dv = laid_out(heads.q, dtype), laid_out(heads.k, dtype), laid_out(heads.v)
    call = _Call(prepared, visible, options)
    gradient = partial(_gradient, call, grad, row_terms)
    _, query_gradient, key_gradient, _ = tiles(heads.q, options.dropout > 0)
    division = schedule.of_queries(heads.q, heads.k, query_gradient, options)
    store = partial(gradient, query_gradient_kernel, query_gradient, division, options.scale, visible.ranges)
    q_gain, q_bias = shared_blocks.raw_gradients(
        store, division, query_gradient.queries, inner.q, inner.q_norm, inner.rotary, DX=dq
    )
    # prepared queries hold a part of the scale: see ops/README.md
    k_factor = options.scale if not heads.raw else options.softcap or 1 / LOG2E
    ranges = None if visible.ranges is None else ranges_of_queries(visible.ranges, heads.k.shape[2])
    division = schedule.of_keys(heads.q, heads.k, key_gradient, options)
    store = partial(gradient, key_gradient_kernel, key_gradient, division, k_factor, ranges)
    k_gain, k_bias = shared_blocks.raw_gradients(
        store, division, key_gradient.keys, inner.k, inner.k_norm, inner.rotary, DX=dk, DV=dv
    )
    dsinks = None
    if visible.sinks is not None:
        peak, total = normaliser.unbind(-1)
        weight = torch.exp2(visible.sinks.float()[:, None] * LOG2E - peak) / total
        terms = (weight * row_terms[:, :, 1, : total.shape[2]]).masked_fill(total == 0, 0.0)
        dsinks = -terms.sum((0, 2)).to(visible.sinks.dtype)
    if not in_kernel:
        undone = norm_rope.backward(dq, dk, heads.q, heads.k, heads.q_norm, heads.k_norm, heads.rotary)
        assert undone.k is not None
        dq, dk, q_gain, q_bias, k_gain, k_bias = undone.q, undone.k, *undone[2:]
    return Gradients(dq, dk, dv, q_gain, q_bias, k_gain, k_bias, dsinks)


def _row_terms(grad: Tensor, out: Tensor, normaliser: Tensor) -> Tensor:
    """The terms of each row that `row_terms_kernel` computes, `[B, H, 3, T′]`."""
    (b, h, t, d), rows = out.shape, 64
    stride = -(-t // ALIGNED.value) * ALIGNED.value
    row_terms = normaliser.new_empty(b, h, 3, stride)
    launch(
        row_terms_kernel,
        (stride // rows * b * h,),
        grad.device,
        OUT=as_tiles(out, rows),
        GRAD=as_tiles(grad, rows),
        normaliser=normaliser,
        row_terms=row_terms,
        heads=h,
        queries=t,
        C=Constants(rows, rows, padded(d), d, POINTERS=uses_pointers(out.device), EXACT=out.dtype == torch.float32),
        num_warps=4,
    )
    return row_terms


def _kernels_undo_norm(heads: Heads) -> bool:
    """Whether the attention kernels undo norm and RoPE, in registers; for other heads a launch of its own does."""
    d, rotary = heads.q.shape[-1], heads.rotary
    whole = rotary is None or (2 * rotary.cos.shape[-1] == d and not rotary.interleaved)
    return not heads.raw or (d == padded(d) and d <= 128 and whole)


def _gradient(
    call: _Call,
    grad: Tensor,
    row_terms: Tensor,
    kernel: Any,
    shape: Tile,
    division: schedule.Division,
    factor: float,
    ranges: Tensor | None,
    rows: int,
    raw: RawGradient,
    **stored: Tensor,
) -> None:
    """Launch a kernel that stores gradients, in blocks of `rows`. The kernel of dk and dv is launched for each variant,
    and for dk and dv separately if `apart`.
    """
    dtype = call.prepared.q.dtype
    bounded, sinks = call.prepared.bound is not None, call.visible.sinks is not None
    variants = backward_variants(dtype, call.options.softcap, bounded, sinks)
    launches = [variants] if kernel is query_gradient_kernel else [[variant] for variant in variants]
    for omitted, loops in product(("keys", "values") if shape.apart else ("none",), launches):
        _launch(
            kernel,
            raw.programs,
            call,
            shape,
            loops,
            {
                "EXACT": dtype == torch.float32,
                "OMIT": omitted,
                "ONE_LOOP": shape.one_loop or dtype == torch.float32,
                "UNHOISTED": shape.unhoisted,
            },
            **head_arguments(shape, shape.queries, GRAD=grad),
            **head_arguments(shape, rows, **stored),
            **division._asdict(),
            **raw.arguments,
            row_terms=row_terms,
            factor=factor,
            ranges=ranges,
        )
