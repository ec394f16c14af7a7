"""The checks of the fused operators' arguments. The kernels read and write memory without checks of their own."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from hf_qknorm.ops.checks import check_call, check_heads
from hf_qknorm.ops.norms import NORMS
from hf_qknorm.ops.traces import constant_in_traces
from hf_qknorm.ops.triton.architectures import ARCHITECTURES
from hf_qknorm.ops.types import DTYPES, MOST_COLUMNS, Heads, Norm, Options, Rotary, Visible

_find_spec = functools.cache(importlib.util.find_spec)


def why_not_fused(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """The reason why the kernels can't take these heads `[B, H or Hk, T or S, D]`, or None if they can.

    Values may be wider or narrower than queries and keys: all three are padded to the widest.
    """
    head_dim, size = max(q.shape[-1], v.shape[-1]), q.element_size()
    if q.dtype not in DTYPES:
        return f"the kernels compute in {', '.join(map(str, DTYPES))}, got {q.dtype}"
    if head_dim > MOST_COLUMNS:
        return f"head_dim is {head_dim}, and the kernels' registers hold {MOST_COLUMNS} at most"
    if head_dim * size % 16:
        return (
            f"head_dim is {head_dim}: rows of {q.dtype} must be multiples of 16 bytes, that is of {16 // size} numbers"
        )
    if not (q.numel() and k.numel()):
        return f"there is nothing to attend: q {list(q.shape)}, k {list(k.shape)}"
    return _why_not_here(str(q.device))


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


@functools.cache
def _capability(device: str) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def check_attention(heads: Heads, visible: Visible, options: Options) -> None:
    """Raise ValueError unless these are the arguments of one fused attention."""
    q, seed = heads.q, visible.seed
    check_call(heads, visible, options)
    _check_kernel_heads(heads)
    if visible.mask is not None:
        raise ValueError("fused attention takes ranges of keys and no mask: use library.attention")
    if options.scale <= 0:  # the kernels take a maximum before they multiply by it
        raise ValueError(f"scale must be positive, got {options.scale}")
    if options.dropout > 0 and seed is None:
        raise ValueError("dropout needs a seed, [1] in torch.int64, got None")
    if seed is not None and (seed.shape != (1,) or seed.dtype != torch.int64):
        raise ValueError(f"the seed of dropout must be [1] in torch.int64, got {list(seed.shape)} in {seed.dtype}")
    _check_tensors(q, floating=True, sinks=visible.sinks)
    _check_tensors(q, floating=False, ranges=visible.ranges, seed=seed)


def check_gradients(q: Tensor, grad: Tensor, out: Tensor, normaliser: Tensor) -> None:
    """Raise ValueError unless these are the gradient and the results of a fused attention with queries q."""
    shape = (*q.shape[:3], 2)
    if grad.shape != q.shape or out.shape != q.shape or normaliser.shape != shape:
        got = f"{list(grad.shape)}, {list(out.shape)} and {list(normaliser.shape)}"
        raise ValueError(f"expected grad and out {list(q.shape)} and normaliser {list(shape)}, got {got}")
    if not grad.dtype == out.dtype == q.dtype or normaliser.dtype != torch.float32:
        got = f"{grad.dtype}, {out.dtype} and {normaliser.dtype}"
        raise ValueError(f"expected grad and out in {q.dtype} and normaliser in torch.float32, got {got}")
    _check_tensors(q, floating=True, grad=grad, out=out, normaliser=normaliser)


def check_norm_rope(q: Tensor, k: Tensor | None, q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> None:
    """Raise ValueError unless these are the arguments of one `norm_rope`."""
    k = q if k is None else k
    check_heads(q, k, k)
    _check_kernel_heads(Heads(q, k, k, q_norm, k_norm, rotary))
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)} must be of one length")


def check_head_gradients(q: Tensor, k: Tensor | None, dq: Tensor, dk: Tensor) -> None:
    """Raise ValueError unless dq and dk can be the gradients of normed q and k; without k, dk is not read."""
    for name, x, gradient in (("dq", q, dq), ("dk", k, dk)):
        if x is not None and gradient.shape != x.shape:
            raise ValueError(f"{name} must be {list(x.shape)}, got {list(gradient.shape)}")
    _check_tensors(q, floating=True, dq=dq, dk=None if k is None else dk)


def _check_kernel_heads(heads: Heads) -> None:
    q, k, v, q_norm, k_norm, rotary = heads
    reason = why_not_fused(q, k, v)
    if reason is not None:
        raise ValueError(f"q, k and v do not fit the kernels: {reason}. Use library.attention, or hf_qknorm_tiled")
    _check_tensors(q, floating=True, k=k, v=v)
    _check_norm("q_norm", q_norm, q)
    _check_norm("k_norm", k_norm, k)
    if heads.raw and q.shape[2] != k.shape[2]:
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)} must be of one length to be normed or rotated")
    if rotary is not None:
        _check_rotary(rotary, q)


def _check_norm(name: str, norm: Norm, x: Tensor) -> None:
    if norm.kind != "none" and norm.kind not in NORMS:
        raise ValueError(f"{name}.kind must be one of {', '.join(('none', *NORMS))}, got {norm.kind!r}")
    if not norm.p >= 1:
        raise ValueError(f"{name}.p must be at least 1, got {norm.p}")
    if not norm.eps >= 0:  # nor NaN
        raise ValueError(f"{name}.eps must not be negative, got {norm.eps}")
    for part, value in (("gain", norm.gain), ("bias", norm.bias), ("knee", norm.knee)):
        if value is None:
            continue
        shape, shapes = (*value.shape,), ((1,), x.shape[3:], x.shape[1::2])
        if part in ("gain", "bias") and shape not in shapes:
            here = f"[1], {list(x.shape[3:])} or {list(x.shape[1::2])}"
            raise ValueError(f"{name}.{part} must be [1], [D] or [H, D], here {here}, got {list(shape)}")
        if part == "knee" and (shape != (3,) or not value.is_contiguous()):  # its numbers would wait for the GPU
            raise ValueError(f"{name}.knee must be [3] and contiguous, got {list(shape)}")
        _check_tensors(x, floating=True, **{f"{name}.{part}": value})


def _check_rotary(rotary: Rotary, q: Tensor) -> None:
    cos, sin, _ = rotary
    if cos is None or sin is None:
        raise ValueError("cos and sin must be given together")
    batch, _, length, head_dim = q.shape
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != length:
        raise ValueError(
            f"cos and sin must be [B or 1, T, R/2] with B = {batch} and T = {length}, got {list(cos.shape)} and "
            f"{list(sin.shape)}"
        )
    if 2 * cos.shape[-1] > head_dim:
        raise ValueError(f"a rotation of {2 * cos.shape[-1]} columns does not fit q {list(q.shape)}")
    _check_tensors(q, floating=True, cos=cos, sin=sin)


def _check_tensors(q: Tensor, *, floating: bool, **tensors: Tensor | None) -> None:
    """Raise ValueError for tensors on another device than q, and for integers among floating ones."""
    device = q.device
    for name, x in tensors.items():
        if x is not None and floating and not x.is_floating_point():
            raise ValueError(f"{name} must be of floating point numbers, got {x.dtype}")
        if x is not None and x.device != device:
            raise ValueError(f"{name} must be on the device of q, {device}, got {x.device}")
