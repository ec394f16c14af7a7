"""Norm and RoPE of queries and keys on the host: one launch forward, one backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops.triton.arguments import HeadArguments, NormArguments, RotaryArguments, norm_kind, sum_to
from hf_qknorm.ops.triton.launch import launch, padded
from hf_qknorm.ops.triton.norm_rope_kernel import norm_rope_gradient_kernel, norm_rope_kernel
from hf_qknorm.ops.types import Norm, Rotary, laid_out

ROWS = {16: 128, 32: 64, 64: 32, 128: 16, 256: 8}  # of a tile, by its columns: two loads of 16 bytes a thread
WARPS = 4
STEPS = 4  # tiles of a program of the backward, one after the other: its partial sums are 1/60 of its gradients then


class NormedHeads(NamedTuple):
    """q̂ `[B, H, T, D]`, k̂ `[B, Hk, T, D]`, and the largest ‖q̂‖ of each group and ‖k̂‖, `[B, Hk, 2]` in fp32.

    There is no bound without k, nor with a cache, whose earlier keys are not read.
    """

    q: Tensor
    k: Tensor | None
    bound: Tensor | None


class Cache(NamedTuple):
    """A static cache, keys and values `[B, Hk, S, D]` in dense rows; v `[B, Hk, T, D]`, to go to positions `[T]`.

    Positions outside of S are not written; on a GPU they fail an assertion of the kernel.
    """

    keys: Tensor
    values: Tensor
    v: Tensor
    positions: Tensor


class Gradients(NamedTuple):
    """Gradients of raw q and k, laid out as `[B, T, H, D]`, and of the parameters of their norms."""

    q: Tensor
    k: Tensor | None
    q_gain: Tensor | None
    q_bias: Tensor | None
    k_gain: Tensor | None
    k_bias: Tensor | None


def forward(
    q: Tensor,
    k: Tensor | None,
    q_norm: Norm,
    k_norm: Norm,
    rotary: Rotary | None,
    factor: float = 1.0,
    cache: Cache | None = None,
) -> NormedHeads:
    """Norm and rotate q `[B, H, T, D]` and k `[B, Hk, T, D]`, or q alone, and multiply q by `factor`; round once.

    With a cache, the same launch writes k̂ and the new values there, and the result's k are the cache's keys.
    """
    (batch, heads, length, _), device = q.shape, q.device
    heads_kv = 0 if k is None else k.shape[1]
    total = heads + heads_kv * (1 if cache is None else 2)
    q, k = _dense(q), None if k is None else _dense(k)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=device)
    k_out = bound = None
    if cache is not None:
        k_out = cache.keys
    elif k is not None:
        bound = torch.zeros(batch, heads_kv, 2, device=device)
        k_out = torch.empty(k.shape, dtype=k.dtype, device=device)
    constants = _constants(q, q_norm, k_norm, rotary)
    launch(
        norm_rope_kernel,
        (total * batch * -(-length // constants["BLOCK"]),),
        device,
        q=HeadArguments.of(q),
        q_out=HeadArguments.of(q_out),
        k=None if k is None else HeadArguments.of(k),
        k_out=None if k_out is None else HeadArguments.of(k_out),
        v=None if cache is None else HeadArguments.of(_dense(cache.v)),
        v_out=None if cache is None else HeadArguments.of(cache.values),
        q_norm=NormArguments.of(q_norm),
        k_norm=NormArguments.of(k_norm),
        rotary=RotaryArguments.of(rotary),
        positions=None if cache is None else cache.positions,
        room=0 if cache is None else cache.keys.shape[2],
        bound=None if bound is None else bound.view(torch.int32),
        multiplier=factor,
        heads=heads,
        heads_kv=heads_kv,
        total=total,
        length=length,
        asserts=cache is not None,
        **constants,
    )
    return NormedHeads(q_out, k_out, bound)


def backward(
    dq: Tensor,
    dk: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    q_norm: Norm,
    k_norm: Norm,
    rotary: Rotary | None,
    factor: float = 1.0,
) -> Gradients:
    """Gradients of raw q and k, of gains and biases, for those of q̂ and k̂; the same bits on each run."""
    (batch, heads, length, _), heads_kv = q.shape, 0 if k is None else k.shape[1]
    constants = _constants(q, q_norm, k_norm, rotary)
    programs = batch * -(-length // (constants["BLOCK"] * STEPS))
    queries = _Buffers.of(q, q_norm, programs)
    keys = None if k is None else _Buffers.of(k, k_norm, programs)
    launch(
        norm_rope_gradient_kernel,
        (programs * (heads + heads_kv),),
        q.device,
        dq=HeadArguments.of(_dense(dq)),
        q=HeadArguments.of(_dense(q)),
        dq_raw=HeadArguments.of(queries.dx),
        q_dgain=queries.dgain,
        q_dbias=queries.dbias,
        dk=None if dk is None else HeadArguments.of(_dense(dk)),
        k=None if k is None else HeadArguments.of(_dense(k)),
        dk_raw=None if keys is None else HeadArguments.of(keys.dx),
        k_dgain=None if keys is None else keys.dgain,
        k_dbias=None if keys is None else keys.dbias,
        q_norm=NormArguments.of(q_norm),
        k_norm=NormArguments.of(k_norm),
        rotary=RotaryArguments.of(rotary),
        multiplier=factor,
        heads=heads,
        total=heads + heads_kv,
        length=length,
        STEPS=STEPS,
        **constants,
    )
    if keys is None:
        return Gradients(queries.dx, None, *queries.sums(q_norm), None, None)
    return Gradients(queries.dx, keys.dx, *queries.sums(q_norm), *keys.sums(k_norm))


class _Buffers(NamedTuple):
    """The gradient of raw q or k, and the partial sums `[programs, H, D]` for its norm's gain and bias."""

    dx: Tensor
    dgain: Tensor | None
    dbias: Tensor | None

    @classmethod
    def of(cls, x: Tensor, norm: Norm, programs: int) -> _Buffers:
        dgain, dbias = (
            None if value is None or norm.kind == "none" else torch.empty(programs, *x.shape[1::2], device=x.device)
            for value in (norm.gain, norm.bias)
        )
        return cls(laid_out(x), dgain, dbias)

    def sums(self, norm: Norm) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of gain and bias, in their shapes."""
        return sum_to(self.dgain, norm.gain), sum_to(self.dbias, norm.bias)


def _dense(x: Tensor) -> Tensor:
    """x, copied only if its rows have gaps."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _constants(q: Tensor, q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> dict[str, Any]:
    columns = padded(q.shape[-1])
    return {
        "BLOCK": ROWS[columns],
        "PADDED": columns,
        "HEAD_DIM": q.shape[-1],
        "Q_NORM": norm_kind(q_norm),
        "K_NORM": norm_kind(k_norm),
        "ROTARY": 0 if rotary is None else 2 * rotary.cos.shape[-1],
        "INTERLEAVED": rotary is not None and rotary.interleaved,
        "num_warps": WARPS,
    }
