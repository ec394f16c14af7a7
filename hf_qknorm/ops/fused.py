"""The fused operators: norm, RoPE and attention in Triton kernels, as torch.library ops. Importing loads no kernels."""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops.checks import check_call, check_rules, refuse_forward_mode
from hf_qknorm.ops.fused_ops import OPERATORS, flatten
from hf_qknorm.ops.heads import Norm, Rotary

NOTHING = Norm()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NORMS = ("none", "rms", "layer", "l2", "lp")


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_norm: Norm = NOTHING,
    k_norm: Norm = NOTHING,
    rotary: Rotary | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    window: int | None = None,
    ranges: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Norm and rotate q and k, then softmax(cap(scale·q·kᵀ))·v: `[B, H, T, D]`, laid out as `[B, T, H, D]`.

    q `[B, H, T, D]`; k, v `[B, Hk, S, D]` with H a multiple of Hk, of any strides, such as a projection's; T and S may
    differ where nothing is rotated. The other arguments are those of `library.attention`. For backward it keeps raw
    q, k, v, the output and its log-sum-exp; its gradients are the same bits on each run.

    Raises ValueError, with the reason, for what the kernels do not do: see `why_not_fused`.
    """
    options = (scale, softcap, causal, window, dropout)
    return _attend((q, k, v), (q_norm, k_norm, rotary), ranges, sinks, options)[0]


class LogitStatistics(NamedTuple):
    """Of each query's logits `[B, H, T]`: the largest |scale·q·k| before the cap, and the weights' entropy in nats."""

    largest: Tensor
    entropy: Tensor


def fused_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_norm: Norm = NOTHING,
    k_norm: Norm = NOTHING,
    rotary: Rotary | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    window: int | None = None,
    ranges: Tensor | None = None,
    sinks: Tensor | None = None,
) -> LogitStatistics:
    """What `fused_attention` with the same arguments does to its logits; no gradient, no T×S tensor."""
    options = (scale, softcap, causal, window, 0.0)
    with torch.no_grad():
        _, _, largest, entropy = _attend((q, k, v), (q_norm, k_norm, rotary), ranges, sinks, options, statistics=True)
    return LogitStatistics(largest, entropy)


def _attend(
    heads: tuple[Tensor, Tensor, Tensor],
    ends: tuple[Norm, Norm, Rotary | None],
    ranges: Tensor | None,
    sinks: Tensor | None,
    options: tuple[float | None, float | None, bool, int | None, float],
    statistics: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Check the call, and make it: output, log-sum-exp and, if wanted, `LogitStatistics`' two; else these are empty."""
    (q, k, v), (scale, softcap, causal, window, dropout) = heads, options
    check_call(q, k, v, None, ranges, sinks, dropout)
    check_rules(scale, softcap, causal, window)
    _require(q, k, v, *ends)
    seed = torch.randint(torch.iinfo(torch.int64).max, (1,), device=q.device) if dropout > 0 else None
    parts, settings = flatten(*ends)
    visible = (_spread(ranges, q), sinks, seed)
    rules = (_positive(scale, q), softcap, causal, window, dropout)
    return OPERATORS.fused_attention(q, k, v, *parts, *visible, *settings, *rules, statistics)


def norm_rope(q: Tensor, k: Tensor, q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
    """Norm and rotate q `[B, H, T, D]` and k `[B, Hk, T, D]` in one launch, for what goes into a cache.

    Raises ValueError, with the reason, for what the kernels do not do: see `why_not_fused`.
    """
    check_call(q, k, k, None, None, None, 0.0)
    _require(q, k, k, q_norm, k_norm, rotary)
    parts, settings = flatten(q_norm, k_norm, rotary)
    return OPERATORS.norm_rope(q, k, *parts, *settings)


def norm_rope_into(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    q_norm: Norm,
    k_norm: Norm,
    rotary: Rotary | None,
) -> Tensor:
    """`norm_rope`, with the new keys and values written to a static cache by the same launch; returns the queries.

    keys, values `[B, Hk, S, D]` are changed in place at `positions` `[T]` (int64) of their third axis. No gradient.

    Raises ValueError for tensors that need gradients, and, with the reason, for what the kernels do not do.
    """
    check_call(q, k, v, None, None, None, 0.0)
    _require(q, k, v, q_norm, k_norm, rotary)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, keys, values)):
        raise ValueError("writing to a cache has no gradient: call it under torch.no_grad(), or use norm_rope")
    if keys.dtype != k.dtype or values.dtype != v.dtype or positions.shape != k.shape[2:3]:
        raise ValueError(
            f"expected a cache in {k.dtype} and positions [{k.shape[2]}], got {keys.dtype}, {values.dtype} and "
            f"{list(positions.shape)}"
        )
    parts, settings = flatten(q_norm, k_norm, rotary)
    return OPERATORS.norm_rope_into(q, k, v, keys, values, positions, *parts, *settings)


def why_not_fused(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernels can't take these heads `[B, H or Hk, T or S, D]`, or None if they can."""
    head_dim, size = q.shape[-1], q.element_size()
    if q.dtype not in DTYPES:
        return f"the kernels compute in {', '.join(map(str, DTYPES))}, got {q.dtype}"
    if head_dim > 256:
        return f"head_dim is {head_dim}, and the kernels' registers hold 256 at most"
    if head_dim * size % 16:
        return (
            f"head_dim is {head_dim}: rows of {q.dtype} must be multiples of 16 bytes, that is of {16 // size} numbers"
        )
    if 0 in (*q.shape, *k.shape):
        return f"there is nothing to attend: q {list(q.shape)}, k {list(k.shape)}"
    return _why_not_here(str(q.device))


def _why_not_here(device: str) -> str | None:
    """Why kernels can't run on a device; the CPU can where Triton interprets."""
    kind = torch.device(device).type
    interpreted = kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if interpreted:
        return None
    if kind != "cuda" or torch.version.hip is not None:
        return f"the kernels are for NVIDIA GPUs, and the tensors are on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in (9, 10):
        return f"the kernels' tiles need the shared memory of compute capability 9 or 10, and {device} has {capability}"
    return None


# What torch.compiler.assume_constant_result does, without importing torch._dynamo, which loads Triton.
_why_not_here._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _require(q: Tensor, k: Tensor, v: Tensor, q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> None:
    refuse_forward_mode(*q_norm[1:4], *k_norm[1:4])
    reason = why_not_fused(q, k, v)
    if reason is not None:
        raise ValueError(f"fused attention can't run: {reason}. Use library.attention, or hf_qknorm_tiled")
    for name, norm, x in (("q_norm", q_norm, q), ("k_norm", k_norm, k)):
        if norm.kind not in NORMS:
            raise ValueError(f"{name}.kind must be one of {', '.join(NORMS)}, got {norm.kind!r}")
        for part, value in (("gain", norm.gain), ("bias", norm.bias)):
            shapes = ([1], [x.shape[3]], [x.shape[1], x.shape[3]])
            if value is not None and list(value.shape) not in shapes:
                here = f"{shapes[0]}, {shapes[1]} or {shapes[2]}"
                raise ValueError(f"{name}.{part} must be [1], [D] or [H, D], here {here}, got {list(value.shape)}")
    if rotary is not None:
        wanted = [q.shape[2], rotary.cos.shape[-1]]
        if rotary.cos.shape != rotary.sin.shape or list(rotary.cos.shape[-2:]) != wanted or rotary.cos.dim() != 3:
            got = f"{list(rotary.cos.shape)} and {list(rotary.sin.shape)}"
            raise ValueError(f"cos and sin must be [B or 1, T, R/2] with T = {q.shape[2]}, got {got}")
        if 2 * rotary.cos.shape[-1] > q.shape[3] or q.shape[2] != k.shape[2]:
            raise ValueError(
                f"a rotation of {2 * rotary.cos.shape[-1]} columns does not fit q {list(q.shape)}, k {list(k.shape)}"
            )


def _spread(ranges: Tensor | None, q: Tensor) -> Tensor | None:
    """Ranges as kernels read them: of every row of the batch, without gaps."""
    return None if ranges is None else ranges.expand(q.shape[0], -1, -1).contiguous()


def _positive(scale: float | None, q: Tensor) -> float:
    """The scale, 1/√D by default; the kernels take a maximum before they multiply by it."""
    if scale is not None and scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    return q.shape[-1] ** -0.5 if scale is None else scale
