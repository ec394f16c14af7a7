"""Norm and RoPE of queries and keys on the host: one launch forward, one backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops.triton.arguments import (
    HeadArguments,
    NormArguments,
    NormConstants,
    RotaryArguments,
    partial_sums,
    sum_to,
)
from hf_qknorm.ops.triton.launch import dense, launch, padded, units
from hf_qknorm.ops.triton.norm_rope_kernel import norm_rope_gradient_kernel, norm_rope_kernel
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, laid_out

ROWS = {16: 128, 32: 64, 64: 32, 128: 16, 256: 8}  # of a tile, by its columns: two loads of 16 bytes a thread
WARPS = 4
STEPS = 4  # tiles of a program of the backward, one after the other: its partial sums are 1/60 of its gradients then


class NormedHeads(NamedTuple):
    """q̂ `[B, H, T, D]`, k̂ `[B, Hk, T, D]`, and the largest ‖q̂‖ of each group and ‖k̂‖, `[B, Hk, 2]` in fp32.

    There is no bound unless it is asked for.
    """

    q: Tensor
    k: Tensor | None
    bound: Tensor | None


def forward(
    q: Tensor,
    k: Tensor | None,
    q_norm: Norm,
    k_norm: Norm,
    rotary: Rotary | None,
    factor: float = 1.0,
    *,
    bounded: bool = False,
) -> NormedHeads:
    """Norm and rotate q `[B, H, T, D]` and k `[B, Hk, T, D]`, or q alone, and multiply q by `factor`; round once.

    A bound takes a launch that fills it with zeros.
    """
    (batch, heads, length, _), heads_kv = q.shape, 0 if k is None else k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = None if k is None else torch.empty(k.shape, dtype=k.dtype, device=q.device)
    bound = torch.zeros(batch, heads_kv, 2, dtype=torch.float32, device=q.device) if bounded else None
    arguments = _arguments(q, q_norm, k_norm, rotary)
    launch(
        norm_rope_kernel,
        ((heads + heads_kv) * batch * -(-length // arguments["BLOCK"]),),
        q.device,
        q=HeadArguments.of(q),
        q_out=HeadArguments.of(q_out),
        k=HeadArguments.of(k),
        k_out=HeadArguments.of(k_out),
        bound=None if bound is None else bound.view(torch.int32),
        multiplier=factor,
        heads_kv=heads_kv,
        **arguments,
    )
    return NormedHeads(q_out, k_out, bound)


def backward(
    dq: Tensor, dk: Tensor | None, q: Tensor, k: Tensor | None, q_norm: Norm, k_norm: Norm, rotary: Rotary | None
) -> tuple[Tensor | None, ...]:
    """Gradients of raw q and k, laid out as `[B, T, H, D]`, and of gain and bias of q's norm and of k's.

    They are computed from the gradients of q̂ and k̂, and have the same bits on each run.
    """
    (batch, heads, length, head_dim), heads_kv = q.shape, 0 if k is None else k.shape[1]
    arguments = _arguments(q, q_norm, k_norm, rotary)
    programs = batch * -(-length // (arguments["BLOCK"] * STEPS))
    dq_raw, dk_raw = laid_out(q), None if k is None else laid_out(k)
    q_gain, q_bias = partial_sums(q_norm, (programs, heads, head_dim), q.device)
    k_gain, k_bias = partial_sums(Norm() if k is None else k_norm, (programs, heads_kv, head_dim), q.device)
    launch(
        norm_rope_gradient_kernel,
        (programs * (heads + heads_kv),),
        q.device,
        dq=HeadArguments.of(dq),
        q=HeadArguments.of(q),
        dq_raw=HeadArguments.of(dq_raw),
        q_dgain=q_gain,
        q_dbias=q_bias,
        dk=HeadArguments.of(dk),
        k=HeadArguments.of(k),
        dk_raw=HeadArguments.of(dk_raw),
        k_dgain=k_gain,
        k_dbias=k_bias,
        total=heads + heads_kv,
        STEPS=STEPS,
        **arguments,
    )
    sums = ((q_gain, q_norm.gain), (q_bias, q_norm.bias), (k_gain, k_norm.gain), (k_bias, k_norm.bias))
    return dq_raw, dk_raw, *(sum_to(*pair) for pair in sums)


def _arguments(q: Tensor, q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> dict[str, Any]:
    """The arguments that both kernels have."""
    columns = padded(q.shape[-1])
    return {
        "q_norm": NormArguments.of(q_norm),
        "k_norm": NormArguments.of(k_norm),
        "rotary": RotaryArguments.of(rotary),
        "heads": q.shape[1],
        "length": q.shape[2],
        "BLOCK": ROWS[columns],
        "PADDED": columns,
        "HEAD_DIM": q.shape[-1],
        "Q_NORM": NormConstants.of(q_norm),
        "K_NORM": NormConstants.of(k_norm),
        "ROTARY": 0 if rotary is None else 2 * rotary.cos.shape[-1],
        "INTERLEAVED": rotary is not None and rotary.interleaved,
        "num_warps": WARPS,
    }


class PreparedHeads(NamedTuple):
    """q, k, v after norm and RoPE, and the largest norms of q and k `[B, Hk, 2]` if one of these was applied.

    A score is q·k, times `unit` if `scaled`; `cap` makes logits of scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bound: Tensor | None
    unit: float
    cap: float
    scaled: bool

    @classmethod
    def of(cls, heads: Heads, options: Options) -> PreparedHeads:
        v = dense(heads.v)
        unit, cap, scaled = units(options.scale, options.softcap)
        if not heads.raw:
            return cls(dense(heads.q), dense(heads.k), v, None, unit, cap, scaled)
        before, after = (unit, cap) if scaled else (cap, 1.0)
        q, k, _, q_norm, k_norm, rotary = heads
        normed = forward(q, k, q_norm, k_norm, rotary, before, bounded=True)
        assert normed.k is not None
        return cls(normed.q, normed.k, v, normed.bound, 1.0, after, False)
