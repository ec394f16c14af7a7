"""Fused attention on the host: the kernels of forward and backward, their buffers, arguments and constants."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops.triton import attention_decode, gluon, norm_rope, schedule
from hf_qknorm.ops.triton.architectures import Tile
from hf_qknorm.ops.triton.arguments import (
    NormArguments,
    NormConstants,
    RotaryArguments,
    ScoreArguments,
    partial_sums,
    ranges_of_queries,
    sum_to,
)
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
    by_pointers,
    constants,
    dense,
    dropout_numbers,
    forward_variants,
    launch,
    loop_constants,
    padded,
    pointers,
    precision,
    reach,
    tiles,
)
from hf_qknorm.ops.triton.norm_rope import PreparedHeads
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible, laid_out


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
    call = _Call(PreparedHeads.of(heads, options), visible, options)
    if not heads.raw and not statistics and not options.dropout and attention_decode.suits(heads.q, heads.k):
        tile = attention_decode.tile(heads.q, heads.k)
        # pointers on Hopper too: the host encodes a descriptor anew for each launch
        loop = call.loops(tile, call.forward_variants(), POINTERS=True)
        return Result(*attention_decode.forward(*call, tile, loop), None, None)
    out = laid_out(heads.q)
    normaliser = heads.q.new_empty(*heads.q.shape[:3], 2, dtype=torch.float32)
    largest, entropy = (normaliser.new_empty(heads.q.shape[:3]) for _ in range(2)) if statistics else (None, None)
    if gluon.serves(heads.q, visible, options, statistics):
        gluon.run(call.prepared, out, normaliser, call.loops(gluon.TILE, call.forward_variants()))
    else:
        (q, k, *_), tile = call.prepared, tiles(heads.q).forward
        arguments = call.arguments(tile)
        sinks = visible.sinks is not None
        arguments |= call.loops(tile, call.forward_variants(sinks), SINKS=sinks, STATISTICS=statistics)
        arguments |= {"OUT": as_tiles(out, tile.queries), "ranges": visible.ranges, "sinks": visible.sinks}
        arguments |= {"normaliser": normaliser, "largest_out": largest, "entropy_out": entropy}
        arguments["section"] = schedule.query_section(q, k, tile.queries)
        launch(forward_kernel, (blocks(q, tile.queries),), q.device, **arguments)
    if largest is not None and entropy is not None:
        largest *= call.prepared.cap / LOG2E if options.softcap is None else options.softcap
        entropy /= LOG2E
    return Result(out, normaliser, largest, entropy)


class _Call(NamedTuple):
    """The inputs of every kernel of a call."""

    prepared: PreparedHeads
    visible: Visible
    options: Options

    def arguments(self, tile: Tile) -> dict[str, Any]:
        """The arguments of every attention kernel."""
        (q, k, v, *_), visible, options = self
        (h, t), (hk, s) = q.shape[1:3], k.shape[1:3]
        return {
            "Q": as_tiles(q, tile.queries),
            "K": as_tiles(k, tile.keys),
            "V": as_tiles(v, tile.keys),
            "bound": self.prepared.bound,
            "seeds": visible.seed,
            "heads": h,
            "heads_kv": hk,
            "queries": t,
            "keys": s,
            "window": reach(options.window, t, s),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def forward_variants(self, sinks: bool = False) -> list[LoopVariant]:
        """The loops of the forward pass, which begin with the `sinks` if there are any."""
        q, bound = self.prepared.q, self.prepared.bound
        return forward_variants(q.dtype, self.options.softcap, bound is not None, sinks)

    def backward_variants(self) -> list[LoopVariant]:
        """The loops of the gradients: with forward's tanh; the log-sum-exp replaces the maximum."""
        if self.options.softcap is None:
            return [LoopVariant("none", False)]
        return [variant._replace(online=False) for variant in self.forward_variants()]

    def loops(self, tile: Tile, variants: list[LoopVariant], **own: Any) -> dict[str, Any]:
        """The constants of a kernel with the loops of one or two variants, some of its own, and the score's numbers."""
        (q, _, _, _, unit, cap, scaled), visible, options = self
        fields = {
            "POINTERS": by_pointers(q.device),
            "CAUSAL": options.causal,
            "WINDOW": options.window is not None,
            "RANGES": visible.ranges is not None,
            "SCALED": scaled,
            "DROPOUT": options.dropout > 0,
            "PRECISION": precision(q.dtype),
        }
        score = ScoreArguments(unit, cap, variants[0].limit, *dropout_numbers(options.dropout))
        return {"score": score, **loop_constants(tile, q.shape[-1], *variants, **fields | own)}


def backward(
    grad: Tensor, heads: Heads, visible: Visible, options: Options, out: Tensor, normaliser: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of raw q, k and v, of gain and bias of q's norm and of k's, and of the sinks; None for absent ones.

    They are computed for `grad` `[B, H, T, D]` from raw heads, output and normaliser alone: the same bits on each run.
    """
    call, grad = _Call(PreparedHeads.of(heads, options), visible, options), dense(grad)
    row_terms = _row_terms(grad, dense(out), normaliser)
    in_kernel = _kernels_undo_norm(heads)
    inner = heads if in_kernel else heads._replace(q_norm=Norm(), k_norm=Norm(), rotary=None)
    dtype = heads.q.dtype if in_kernel else torch.float32
    dq, dk, dv = laid_out(heads.q, dtype), laid_out(heads.k, dtype), laid_out(heads.v)
    q_parameters = _query_gradient(call, grad, row_terms, Raw(inner.q, inner.q_norm, inner.rotary, dq))
    # prepared queries hold a part of the scale: see ops/README.md
    factor = options.scale if not heads.raw else options.softcap or 1 / LOG2E
    k_parameters = _key_gradient(call, grad, row_terms, Raw(inner.k, inner.k_norm, inner.rotary, dk), dv, factor)
    dsinks = None
    if visible.sinks is not None:
        peak, total = normaliser.unbind(-1)
        weight = torch.exp2(visible.sinks.float()[:, None] * LOG2E - peak) / total
        terms = (weight * row_terms[:, :, 1, : total.shape[2]]).masked_fill(total == 0, 0.0)
        dsinks = -terms.sum((0, 2)).to(visible.sinks.dtype)
    if in_kernel:
        return dq, dk, dv, *q_parameters, *k_parameters, dsinks
    q, k, _, q_norm, k_norm, rotary = heads
    dq_raw, dk_raw, *parameters = norm_rope.backward(dq, dk, q, k, q_norm, k_norm, rotary)
    return dq_raw, dk_raw, dv, *parameters, dsinks


def _row_terms(grad: Tensor, out: Tensor, normaliser: Tensor) -> Tensor:
    """The terms of each row that `row_terms_kernel` computes, `[B, H, 3, T′]`."""
    (b, h, t, d), rows = out.shape, 64
    stride = -(-t // ALIGNED.value) * ALIGNED.value
    row_terms = normaliser.new_empty(b, h, 3, stride)
    launch(
        row_terms_kernel,
        (stride // rows * b * h,),
        grad.device,
        OUT=pointers(out),  # on Hopper too: the host encodes a descriptor anew for each launch
        GRAD=pointers(grad),
        normaliser=normaliser,
        row_terms=row_terms,
        heads=h,
        queries=t,
        C=constants(rows, rows, padded(d), d, POINTERS=True, EXACT=out.dtype == torch.float32),
        num_warps=4,
    )
    return row_terms


def _kernels_undo_norm(heads: Heads) -> bool:
    """Whether the attention kernels undo norm and RoPE, in registers; for other heads a launch of its own does."""
    d, rotary = heads.q.shape[-1], heads.rotary
    whole = rotary is None or (2 * rotary.cos.shape[-1] == d and not rotary.interleaved)
    return not heads.raw or (d == padded(d) and d <= 128 and whole)


class Raw(NamedTuple):
    """Raw heads x `[B, H, T, D]`, the norm and rotation that a kernel undoes, and dx, which gets their gradient."""

    x: Tensor
    norm: Norm
    rotary: Rotary | None
    dx: Tensor

    def arguments(self, rows: int, section: int) -> dict[str, Any]:
        """Those of `undo_norm_rope.store_raw_gradient` in a kernel with blocks of `rows`, ordered by `section`."""
        (b, heads, length, d), kind = self.x.shape, NormConstants.of(self.norm)
        sums = b * heads // section, -(-length // rows), section, padded(d)
        dgain, dbias = partial_sums(self.norm, sums, self.x.device)
        return {
            "X": None if kind is None else as_tiles(dense(self.x), rows),
            "DX": as_tiles(self.dx, rows),
            "norm": NormArguments.of(self.norm),
            "dgain": dgain,
            "dbias": dbias,
            "rotary": RotaryArguments.of(self.rotary),
            "NORM": kind,
            "section": section,
        }

    def parameters(self, arguments: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the norm's gain and bias, None for absent ones, after the kernel with these arguments."""
        gain, bias = (
            # of each head apart, sections and blocks are first added up
            x if x is None or like is None or like.ndim == 1 else x.sum(1).view(-1, *like.shape)
            for x, like in ((arguments["dgain"], self.norm.gain), (arguments["dbias"], self.norm.bias))
        )
        return sum_to(gain, self.norm.gain), sum_to(bias, self.norm.bias)


def _query_gradient(call: _Call, grad: Tensor, row_terms: Tensor, raw: Raw) -> tuple[Tensor | None, Tensor | None]:
    """Store the gradient of raw queries; returns those of the norm's gain and bias."""
    (q, k, *_), visible, options = call
    tile = tiles(q).query_gradient
    arguments = call.arguments(tile) | raw.arguments(tile.queries, schedule.query_section(q, k, tile.queries))
    arguments |= call.loops(tile, call.backward_variants(), EXACT=q.dtype == torch.float32, UNHOISTED=tile.unhoisted)
    arguments |= {"GRAD": as_tiles(grad, tile.queries), "row_terms": row_terms}
    arguments |= {"ranges": visible.ranges, "factor": options.scale}
    launch(query_gradient_kernel, (blocks(q, tile.queries),), q.device, **arguments)
    return raw.parameters(arguments)


def _key_gradient(
    call: _Call, grad: Tensor, row_terms: Tensor, raw: Raw, dv: Tensor, factor: float
) -> tuple[Tensor | None, Tensor | None]:
    """Store the gradients of raw keys and of values, in a launch for each loop, and for both apart where they do not
    fit the registers; returns the gradients of the norm's gain and bias.
    """
    (q, k, *_), visible, _ = call
    tile = tiles(q).key_gradient
    arguments = call.arguments(tile) | raw.arguments(tile.keys, schedule.key_section(q, k, tile.keys))
    arguments |= {"GRAD": as_tiles(grad, tile.queries), "row_terms": row_terms}
    ranges = None if visible.ranges is None else ranges_of_queries(visible.ranges, k.shape[2])
    arguments |= {"DV": as_tiles(dv, tile.keys), "ranges": ranges, "factor": factor}
    own = {"EXACT": q.dtype == torch.float32, "UNHOISTED": tile.unhoisted, "ONE_LOOP": tile.one_loop}
    for omitted, variant in product(("keys", "values") if tile.apart else ("none",), call.backward_variants()):
        arguments |= call.loops(tile, [variant], OMIT=omitted, **own)
        launch(key_gradient_kernel, (blocks(k, tile.keys),), q.device, **arguments)
    return raw.parameters(arguments)


def blocks(x: Tensor, rows: int) -> int:
    """The number of blocks of so many rows of heads `[B, H, T, D]`."""
    b, h, t, _ = x.shape
    return b * h * -(-t // rows)
