"""Norm and RoPE of queries and keys on the host: one launch into attention, one back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops.triton.arguments import norm_arguments, norm_kind, rotary_arguments, sum_to
from hf_qknorm.ops.triton.launch import launch, padded
from hf_qknorm.ops.triton.norm_rope_kernel import prologue_gradient_kernel, prologue_kernel
from hf_qknorm.ops.types import Norm, Rotary, laid_out

ROWS = {16: 128, 32: 64, 64: 32, 128: 16, 256: 8}  # of a tile, by its columns: two loads of 16 bytes a thread
WARPS = 4
STEPS = 4  # tiles that a program of the backward takes in turn: its partial sums are 1/60 of its gradients then


class Prologue(NamedTuple):
    """q̂ `[B, H, T, D]`, k̂ `[B, Hk, T, D]`, and the largest ‖q̂‖ of each group and ‖k̂‖, `[B, Hk, 2]` in fp32.

    There is no bound without k, nor with a cache: what that already holds is not read.
    """

    q: Tensor
    k: Tensor | None
    bound: Tensor | None


class Cache(NamedTuple):
    """A static cache, keys and values `[B, Hk, S, D]` in dense rows; v `[B, Hk, T, D]`, to go to positions `[T]`.

    Nothing is written for a position outside of S; on a GPU it fails an assertion of the kernel's.
    """

    keys: Tensor
    values: Tensor
    v: Tensor
    positions: Tensor


class Gradients(NamedTuple):
    """Of raw q and k, laid out as `[B, T, H, D]`, and of what their norms have."""

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
) -> Prologue:
    """Norm and rotate q `[B, H, T, D]` and k `[B, Hk, T, D]`, or q alone, and multiply q by `factor`; round once.

    Given a cache, the same launch writes k̂ and the new values there, and its keys are what is returned as k̂.
    """
    (batch, heads, length, _), device = q.shape, q.device
    q, q_out = _dense(q), torch.empty(q.shape, dtype=q.dtype, device=device)
    keys = values = k_out = bound = None
    total, heads_kv = heads, 0
    if k is not None:
        k, heads_kv = _dense(k), k.shape[1]
        total += heads_kv
        if cache is None:
            bound = torch.zeros(batch, heads_kv, 2, device=device)
            k_out = torch.empty(k.shape, dtype=k.dtype, device=device)
        else:
            k_out = cache.keys
        keys = (*_strided(k), *_strided(k_out))
    if cache is not None:
        values = (*_strided(_dense(cache.v)), *_strided(cache.values))
        total += heads_kv
    constants = _constants(q, q_norm, k_norm, rotary)
    launch(
        prologue_kernel,
        (total * batch * -(-length // constants["BLOCK"]),),
        device,
        (*_strided(q), *_strided(q_out)),
        keys,
        values,
        norm_arguments(q_norm),
        norm_arguments(k_norm),
        rotary_arguments(rotary),
        None if cache is None else cache.positions,
        0 if cache is None else cache.keys.shape[2],
        None if bound is None else bound.view(torch.int32),
        factor,
        heads,
        heads_kv,
        total,
        length,
        asserts=cache is not None,
        **constants,
    )
    return Prologue(q_out, k_out, bound)


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
    queries = _Side.of(dq, q, q_norm, programs)
    keys = None if k is None or dk is None else _Side.of(dk, k, k_norm, programs)
    launch(
        prologue_gradient_kernel,
        (programs * (heads + heads_kv),),
        q.device,
        queries.arguments,
        None if keys is None else keys.arguments,
        norm_arguments(q_norm),
        norm_arguments(k_norm),
        rotary_arguments(rotary),
        factor,
        heads,
        heads + heads_kv,
        length,
        STEPS=STEPS,
        **constants,
    )
    if keys is None:
        return Gradients(queries.dx, None, *queries.sums(q_norm), None, None)
    return Gradients(queries.dx, keys.dx, *queries.sums(q_norm), *keys.sums(k_norm))


class _Side(NamedTuple):
    """The backward's tensors of q, or of k."""

    dx: Tensor
    dgain: Tensor | None
    dbias: Tensor | None
    arguments: tuple[object, ...]

    @classmethod
    def of(cls, grad: Tensor, x: Tensor, norm: Norm, programs: int) -> _Side:
        heads, head_dim, dx = x.shape[1], x.shape[3], laid_out(x)
        dgain, dbias = (
            None if value is None or norm.kind == "none" else torch.empty(programs, heads, head_dim, device=x.device)
            for value in (norm.gain, norm.bias)
        )
        arguments = (*_strided(_dense(grad)), *_strided(_dense(x)), *_strided(dx), dgain, dbias)
        return cls(dx, dgain, dbias, arguments)

    def sums(self, norm: Norm) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of gain and bias, in their shapes."""
        return sum_to(self.dgain, norm.gain), sum_to(self.dbias, norm.bias)


def _dense(x: Tensor) -> Tensor:
    """x, copied only if its rows have gaps."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strided(x: Tensor) -> tuple[Tensor | int, ...]:
    return x, *x.stride()[:3]


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
