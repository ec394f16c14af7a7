"""`QKNormAttention`: the shared attention forward with its kernels."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from hf_qknorm.attend import caches, cpu_kernels, functions, implementations
from hf_qknorm.attend.calls import as_results, check_keys, is_padded_ranges, is_ranges, make_call
from hf_qknorm.model.knee_state_dict import KneeStateDict
from hf_qknorm.model.norms import HeadNorm, active_copy, is_unhooked, run_pre_hooks
from hf_qknorm.model.plain_attention import PlainAttention
from hf_qknorm.ops import library
from hf_qknorm.ops.cpu import norm_rope
from hf_qknorm.ops.types import Heads, Norm, Rotary

CPU: Final = torch.device("cpu")
CPP_BACKENDS: Final = ("hf_qknorm", implementations.CPP.name)  # the attention functions that may take the C++ kernels


_latest_rotary: tuple[Any, ...] = (None, None, None, None)  # cos, sin, the family's field, and the rotation of them


class QKNormAttention(KneeStateDict, PlainAttention):
    """The shared attention forward, with norm, RoPE and attention in one kernel where the backend has it."""

    def _attend_in_kernels(
        self, backend: str, heads: Heads, mask: Tensor | None, positions: Any, cache: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None] | None:
        if cache is None and mask is not None:
            check_keys(mask, heads.q.shape[2])
        if self.family.rope is None:
            return None
        q, k, v = heads[:3]
        if implementations.device_type(q) == "cpu" and backend != implementations.TRITON.name:
            return None if cache is None else self._step_in_cpp(backend, heads, mask, positions, cache, options)
        if not functions.takes_raw_heads(self, heads, mask, options):
            return None
        (q, q_norm), (k, k_norm) = self._for_kernels("q_norm", q), self._for_kernels("k_norm", k)
        rotary = kernel_rotary(positions, self.family.rope)
        if not q.dtype == k.dtype == v.dtype:  # a model's own norm may promote them
            q, k = q.to(v.dtype), k.to(v.dtype)
        heads = Heads(q, k, v, q_norm, k_norm, rotary)
        slot: Any = None if cache is None else self.family.style.slot(self, **options)
        if self._fits_one_kernel(heads, mask, cache, slot):
            call = make_call(self, heads, mask, **options)
            if implementations.takes_in_one(self, call):
                if cache is not None:
                    cache.update(implementations.norm_rope_one(self, heads.k, k_norm, rotary), v, slot)
                return as_results(library.fused_attention(*call), v)
        # Without a mask, many queries mean that the cache is empty but for the new keys. Ranges with padding, as in a
        # trace, do not fit: keys would be copied before the new ones are written.
        over_cache = heads.q.shape[2] == 1 if mask is None else is_ranges(mask)
        if over_cache and self._fits_a_step(heads, options) and (into := caches.room(cache, slot, heads.k)) is not None:
            keys, values, filled = into.cache
            call = make_call(self, heads._replace(k=keys, v=values), mask, **options)
            out = implementations.step(self, call, heads, filled)
            into.keep()
            return as_results(out, v)
        q, k = implementations.norm_rope(self, heads)
        if cache is not None:
            k, v = caches.update(cache, slot, k, v, options)
        self.show(q, k, v, mask, options)
        return self.attention_function()(self, q, k, v, mask, **options)

    def _step_in_cpp(
        self, backend: str, heads: Heads, mask: Tensor | None, positions: Any, cache: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None] | None:
        """A step of generation over a growing cache, if the C++ kernels can norm, rotate and write to it.

        They attend in the same call for the package's own backends, where they serve it.
        """
        q, k, v = heads[:3]
        if q.shape[2] > 1 or torch.compiler.is_compiling() or self.family.style.prescaled:
            return None
        if mask is not None and is_padded_ranges(mask):  # keys are copied before they are written
            return None
        if not self._fits_a_step(heads, options) or not cpu_kernels.is_ready():
            return None
        q_module, k_module = self.norm_module("q_norm"), self.norm_module("k_norm")
        q_norm, k_norm = _kernel_norm(q_module, CPU), _kernel_norm(k_module, CPU)
        if q_norm is None or k_norm is None or not q.dtype == k.dtype == v.dtype:
            return None
        own = backend in CPP_BACKENDS
        if q_norm.kind == k_norm.kind == "none" and not own:  # the model's own RoPE
            return None
        heads = Heads(q, k, v, q_norm, k_norm, _step_rotary(positions, self.family.rope))
        if not cpu_kernels.serves_append(heads):
            return None
        into = caches.room(cache, self.family.style.slot(self, **options), k)
        if into is None or into.layer is None:
            return None
        keys, values, _ = into.cache
        heads = heads._replace(q=_before_norm(q_module, q), k=_before_norm(k_module, k))
        if own and not functions.weights_wanted(options):
            call = make_call(self, Heads(q, keys, values), mask, **options)  # before the cache changes: it may refuse
            if cpu_kernels.why_not(*call) is None:
                out = norm_rope.step(heads, into.cache, call.visible, call.options)
                into.keep()
                return as_results(out, v)
        q = norm_rope.append(heads, into.cache)
        into.keep()
        return self.attention_function()(self, q, keys, values, mask, **options)

    def _update(self, cache: Any, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return caches.update(cache, self.family.style.slot(self, **options), k, v, options)

    def _norm_rotate(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and rotate q and k: on a CPU in C++, if its kernels are there and there is a norm."""
        norms = self._cpu_norms(q)
        if norms is not None:
            rotary = kernel_rotary(positions, self.family.rope)
            if all(map(cpu_kernels.serves_norm_rope, (q, k), norms, (rotary, rotary))):
                q, k = _before_norm(self.norm_module("q_norm"), q), _before_norm(self.norm_module("k_norm"), k)
                return *norm_rope.norm_rope(Heads(q, k, v, *norms, rotary)), v
        return super()._norm_rotate(q, k, v, positions, cache, options)

    def _cpu_norms(self, q: Tensor) -> tuple[Norm, Norm] | None:
        """The norms of q and k if the C++ kernels may apply them, with RoPE; None if not, or if there are none.

        With the attention of other libraries they do so in `_step_in_cpp` alone: all other numbers there are the same
        with and without a compiler.
        """
        if type(q) is not Tensor or not q.is_cpu or torch.compiler.is_compiling():
            return None
        if self.family.rope is None or self.family.style.prescaled or not {"q_norm", "k_norm"} & self._modules.keys():
            return None
        if self.config._attn_implementation not in CPP_BACKENDS:
            return None
        # Training waits for the compiler, as its attention does.
        if not cpu_kernels.is_ready() and cpu_kernels.why_not_here(wait=torch.is_grad_enabled()) is not None:
            return None
        q_norm, k_norm = (_kernel_norm(self.norm_module(name), CPU) for name in ("q_norm", "k_norm"))
        if q_norm is None or k_norm is None or q_norm.kind == k_norm.kind == "none":  # bypassed: the model's own RoPE
            return None
        return q_norm, k_norm

    def _fits_one_kernel(self, heads: Heads, mask: Tensor | None, cache: Any, slot: Any) -> bool:
        """Whether one kernel can norm, rotate and attend: there are no other keys, and no observer of the heads."""
        reordered = mask is not None and is_padded_ranges(mask)  # keys move, after their rotation
        padded = heads.v.shape[-1] > heads.k.shape[-1]  # a norm would see the padding
        alone = cache is None or caches.is_empty(cache, slot)
        return alone and not padded and not reordered and not self.observers

    def _fits_a_step(self, heads: Heads, options: dict[str, Any]) -> bool:
        """Whether kernels can norm, rotate and write to a cache, if it has room."""
        if torch.is_grad_enabled() or self.observers:
            return False
        return heads.v.shape == heads.k.shape and options["dropout"] <= 0

    def _for_kernels(self, name: str, x: Tensor) -> tuple[Tensor, Norm]:
        """x and the norm that the kernel applies to it; a norm that it can't apply is applied here."""
        module = self.norm_module(name)
        norm = _kernel_norm(module, x.device)
        return (self.normed(name, x), Norm()) if norm is None else (_before_norm(module, x), norm)


def _kernel_norm(module: Any, device: torch.device) -> Norm | None:
    """A layer's norm on a device, the identity without one; None if its hooks do not end before it."""
    norm = active_copy(module)
    if norm is None:
        return Norm()
    if not is_unhooked(norm) or (norm is not module and not is_unhooked(module)):
        return None
    if type(norm) is nn.Identity:  # it has hooks of an observer
        return Norm()
    return norm.as_norm(device) if type(norm) is HeadNorm else None


def _before_norm(module: Any, x: Tensor) -> Tensor:
    """Heads `[B, H, T, D]`, after the hooks before a layer's norm."""
    for norm in dict.fromkeys((module, active_copy(module))):
        if norm is not None and norm._forward_pre_hooks:
            x = run_pre_hooks(norm, x.transpose(1, 2)).transpose(1, 2)
    return x


def _step_rotary(positions: tuple[Tensor, Tensor] | None, rope: str | None) -> Rotary | None:
    """`kernel_rotary`; the layers of a step share cos and sin, and its result."""
    global _latest_rotary
    if positions is None:
        return None
    cos, sin, known, rotary = _latest_rotary
    if cos is not positions[0] or sin is not positions[1] or known != rope:
        _latest_rotary = _, _, _, rotary = *positions, rope, kernel_rotary(positions, rope)
    return rotary


def kernel_rotary(positions: tuple[Tensor, Tensor] | None, rope: str | None) -> Rotary | None:
    """The kernels' rotation from a model's cos and sin: `[B, T, R]` with each angle twice, or `[B, T, R/2]`.

    `rope` is the family's field. "halves": columns i and i + R/2 turn together. "pairs": columns 2i and 2i + 1 do, and
    the angles are ordered likewise. "pairs_by_halves": as pairs, with angles in the order of halves. "once": as halves,
    with each angle once.
    """
    if positions is None:
        return None
    cos, sin = positions
    width = cos.shape[-1]
    if rope != "once":
        cos, sin = (x[..., ::2] if rope == "pairs" else x.narrow(-1, 0, width // 2) for x in (cos, sin))
    return Rotary(cos, sin, rope in ("pairs", "pairs_by_halves"))
