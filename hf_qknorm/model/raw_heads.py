"""Heads as they are projected, for kernels that norm and rotate them; stand-alone code has no such kernels."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_qknorm.attend import implementations
from hf_qknorm.attend.calls import as_results, is_ranges, make_call
from hf_qknorm.attend.functions import weights_wanted
from hf_qknorm.attend.implementations import TRITON, device_type
from hf_qknorm.families.style import add_to_cache
from hf_qknorm.model.norms import HeadNorm, active_copy, is_unhooked
from hf_qknorm.ops import library
from hf_qknorm.ops.cpu import norm_rope as cpp
from hf_qknorm.ops.traces import needs_torch
from hf_qknorm.ops.types import Heads, Norm, Rotary

KEPT: Final = "qk_norm_rotary"  # of cosines: their sines, the family's `rope`, and the `Rotary` of both


def norm_rotate(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any) -> tuple[Tensor, Tensor] | None:
    """Queries and keys normed and rotated by a kernel: Triton's on CUDA, C++ on a CPU; None if there is none for them.

    Without norms the model's own RoPE is as fast.
    """
    if layer.family.rope is None or needs_torch():
        return None
    if "q_norm" not in layer._modules and "k_norm" not in layer._modules:
        return None
    heads = raw_heads(layer, q, k, v, positions)
    if heads is None or heads.q_norm.kind == heads.k_norm.kind == "none":
        return None
    kernels = _kernels(heads)
    return None if kernels is None else kernels.norm_rope(heads)


def normed(module: nn.Module, x: Tensor) -> Tensor | None:
    """Heads `[B, H, T, D]` after a norm alone, by a kernel; None if there is none for them."""
    norm = None if needs_torch() else as_norm(module)
    if norm is None or norm.kind == "none" or (kernels := _kernels(Heads(x, x, x, norm))) is None:
        return None
    return kernels.norm_rope_one(x, norm, None)


def _kernels(heads: Heads) -> Any:
    """The module whose `norm_rope` and `norm_rope_one` take these heads, or None."""
    match device_type(heads.q):
        case "cuda" if library.why_not_norm_rope(heads) is None:
            return library
        case "cpu" if cpp.why_not(heads) is None:
            return cpp
    return None


def fused_attention(
    layer: Any, backend: str, q: Tensor, k: Tensor, v: Tensor, mask: Any, positions: Any, cache: Any,
    options: dict[str, Any],
) -> tuple[Tensor, None] | None:  # fmt: skip
    """Attention of raw heads by the Triton kernels, which keep nothing else for backward; None if they do not take it.

    They see the new keys alone: there is no cache, or an empty one, which gets them.
    """
    chosen = backend == "hf_qknorm" and device_type(q) == "cuda" and not needs_torch()
    if not (backend == TRITON.name or chosen):
        return None
    slot = 0 if cache is None else layer.family.style.slot(layer, **options)
    alone = cache is None or (type(cache) is DynamicCache and not cache.get_seq_length(slot))
    if not alone or layer.family.rope is None or layer.observers or weights_wanted(options):
        return None
    if v.shape[-1] > k.shape[-1] or (mask is not None and not is_ranges(mask)):  # a norm would see the padding
        return None
    heads = raw_heads(layer, q, k, v, positions)
    if heads is None or library.why_not_fused(heads) is not None:
        return None
    call = make_call(layer, heads, mask, **options)
    if cache is not None:
        add_to_cache(cache, library.norm_rope_one(heads.k, heads.k_norm, heads.rotary), v, slot, options)
    implementations.log_once("runs its Triton kernels, norm and RoPE included")
    return as_results(library.fused_attention(*call), v)


def raw_heads(layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any) -> Heads | None:
    """Heads with their norms and rotation; None if a hook or another module must run in a norm's place."""
    modules = layer._modules
    q_norm, k_norm = as_norm(modules.get("q_norm")), as_norm(modules.get("k_norm"))
    if q_norm is None or k_norm is None:
        return None
    if not q.dtype == k.dtype == v.dtype:  # a model's own norm may promote them
        q, k = q.to(v.dtype), k.to(v.dtype)
    return Heads(q, k, v, q_norm, k_norm, kernel_rotary(positions, layer.family.rope))


def as_norm(module: Any) -> Norm | None:
    """A layer's norm, the identity without one; None if a hook or another module must run in its place."""
    norm = active_copy(module)
    if norm is None:
        return Norm()
    if type(norm) is not HeadNorm or not is_unhooked(norm) or (norm is not module and not is_unhooked(module)):
        return None
    return norm.as_norm()


def kernel_rotary(positions: tuple[Tensor, Tensor] | None, rope: str | None) -> Rotary | None:
    """The kernels' rotation from a model's cos and sin: `[B, T, R]` with each angle twice, or `[B, T, R/2]`.

    `rope` is the family's field. "halves": columns i and i + R/2 turn together. "pairs": columns 2i and 2i + 1 do, and
    the angles are ordered likewise. "pairs_by_halves": as pairs, with angles in the order of halves. "once": as halves,
    with each angle once. The cosines hold the result for the other layers of a step, in the attribute `KEPT`.
    """
    if positions is None:
        return None
    cos, sin = positions
    if torch.compiler.is_compiling() or cos.requires_grad or sin.requires_grad:
        return _each_angle_once(cos, sin, rope)
    kept = vars(cos).get(KEPT)
    if kept is None or kept[0] is not sin or kept[1] != rope:
        # Of `data`: the cosines would never be freed if they held a view of themselves
        kept = sin, rope, _each_angle_once(cos.data, sin.data, rope)
        setattr(cos, KEPT, kept)
    rotary: Rotary = kept[2]
    return rotary


def _each_angle_once(cos: Tensor, sin: Tensor, rope: str | None) -> Rotary:
    """The rotation with each angle once."""
    if rope == "pairs":
        cos, sin = cos[..., ::2], sin[..., ::2]
    elif rope != "once":
        half = cos.shape[-1] // 2
        cos, sin = cos.narrow(-1, 0, half), sin.narrow(-1, 0, half)
    return Rotary(cos, sin, rope in ("pairs", "pairs_by_halves"))
