"""The heads that the Triton kernels take. The kernels check lengths alone: their operators are called after these."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from hf_qknorm.ops.traces import constant_in_traces
from hf_qknorm.ops.triton.architectures import ARCHITECTURES
from hf_qknorm.ops.types import DTYPES, MOST_COLUMNS, Heads, Norm, Rotary

_find_spec = functools.cache(importlib.util.find_spec)
_capability = functools.cache(torch.cuda.get_device_capability)


def why_not_fused(heads: Heads) -> str | None:
    """The reason why the kernels can't attend with these heads, norms and rotation, or None if they can.

    Values may be wider or narrower than queries and keys: all three are padded to the widest.
    """
    head_dim, size = max(heads.q.shape[-1], heads.v.shape[-1]), heads.q.element_size()
    if head_dim > MOST_COLUMNS:
        return f"head_dim is {head_dim}, and the kernels' registers hold {MOST_COLUMNS} at most"
    if head_dim * size % 16:
        rows = f"rows of {heads.q.dtype} must be multiples of 16 bytes, that is of {16 // size} numbers"
        return f"head_dim is {head_dim}: {rows}"
    return why_not_norm_rope(heads)


def why_not_norm_rope(heads: Heads) -> str | None:
    """The reason why the kernels can't norm and rotate these queries and keys, or None if they can."""
    q, k, _, q_norm, k_norm, rotary = heads
    if q.dtype not in DTYPES:
        return f"the kernels compute in {', '.join(map(str, DTYPES))}, got {q.dtype}"
    if q.shape[-1] > MOST_COLUMNS:
        return f"head_dim is {q.shape[-1]}, and the kernels' registers hold {MOST_COLUMNS} at most"
    if not (q.numel() and k.numel()):
        return f"there is nothing to attend: q {list(q.shape)}, k {list(k.shape)}"
    if heads.raw and q.shape[2] != k.shape[2]:
        return f"q {list(q.shape)} and k {list(k.shape)} must be of one length to be normed or rotated"
    reason = _why_not_norm("q_norm", q_norm, q) or _why_not_norm("k_norm", k_norm, k) or why_not_rotary(rotary, q)
    return reason or _why_not_here(str(q.device))


def _why_not_norm(name: str, norm: Norm, x: Tensor) -> str | None:
    count, head_dim = x.shape[1::2]
    for part, value in (("gain", norm.gain), ("bias", norm.bias)):
        if value is not None and (*value.shape,) not in ((1,), (head_dim,), (count, head_dim)):
            here = f"[1], [{head_dim}] or [{count}, {head_dim}]"
            return f"{name}.{part} must be [1], [D] or [H, D], here {here}, got {list(value.shape)}"
    if norm.knee is not None and ((*norm.knee.shape,) != (3,) or not norm.knee.is_contiguous()):
        return f"{name}.knee must be [3] and contiguous, got {list(norm.knee.shape)}"
    return None


def why_not_rotary(rotary: Rotary | None, q: Tensor) -> str | None:
    """The reason why kernels can't rotate queries `[B, H, T, D]` by these angles, or None if they can."""
    if rotary is None:
        return None
    (cos, sin, _), (batch, _, length, head_dim) = rotary, q.shape
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != length:
        expected = f"[B or 1, T, R/2] with B = {batch} and T = {length}"
        return f"cos and sin must be {expected}, got {list(cos.shape)} and {list(sin.shape)}"
    if 2 * cos.shape[-1] > head_dim:
        return f"a rotation of {2 * cos.shape[-1]} columns does not fit q {list(q.shape)}"
    return None


@constant_in_traces
def _why_not_here(device: str) -> str | None:
    """The reason why kernels can't run on a device. On the CPU they run in Triton's interpreter alone."""
    kind = torch.device(device).type
    interpreted = kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if _find_spec("triton") is None:
        return "Triton is not installed"
    if interpreted:
        return None
    if kind != "cuda" or torch.version.hip is not None:
        return f"the kernels are for NVIDIA GPUs, and the tensors are on {device}"
    capability = _capability(device)
    if capability not in ARCHITECTURES:
        supported = ", ".join(map(_version, ARCHITECTURES))
        return f"the kernels have tiles for compute capability {supported}, and {device} has {_version(capability)}"
    return None


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
