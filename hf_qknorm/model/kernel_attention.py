"""`QKNormAttention`: the shared attention forward with its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.attend import caches, cpu_kernels, functions, implementations
from hf_qknorm.attend.calls import as_results, is_padded_ranges, is_ranges, make_call
from hf_qknorm.model.knee_state_dict import KneeStateDict
from hf_qknorm.model.norms import HeadNorm, active_copy, is_unhooked, run_pre_hooks
from hf_qknorm.model.plain_attention import PlainAttention
from hf_qknorm.ops import library
from hf_qknorm.ops.cpu import norm_rope
from hf_qknorm.ops.types import Heads, Norm, Rotary


class QKNormAttention(KneeStateDict, PlainAttention):
    """The shared attention forward, with norm, RoPE and attention in one kernel where the backend has it."""

    def _attend_in_kernels(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, positions: Any, cache: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None] | None:
        if self.family.rope is None or (q.is_cpu and not implementations.TRITON_ON_CPU):
            return None
        if not functions.takes_raw_heads(self, Heads(q, k, v), mask, options):
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
        if self._fits_a_step(heads, mask, options) and (into := caches.room(cache, slot, heads.k)) is not None:
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

    def _update(self, cache: Any, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return caches.update(cache, self.family.style.slot(self, **options), k, v, options)

    def _norm_rotate(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and rotate q and k: on a CPU in C++, if its kernels are there and there is a norm."""
        norms = self._cpu_norms(q, cache)
        if norms is not None:
            rotary = kernel_rotary(positions, self.family.rope)
            if all(map(cpu_kernels.serves_norm_rope, (q, k), norms, (rotary, rotary))):
                q, k = self._before_norm("q_norm", q), self._before_norm("k_norm", k)
                return *norm_rope.norm_rope(Heads(q, k, v, *norms, rotary)), v
        return super()._norm_rotate(q, k, v, positions, cache, options)

    def _cpu_norms(self, q: Tensor, cache: Any) -> tuple[Norm, Norm] | None:
        """The norms of q and k if the C++ kernels may apply them, with RoPE; None if not, or if there are none.

        With the attention of other libraries they apply them in steps of generation alone: all other numbers there are
        the same with and without a compiler.
        """
        if type(q) is not Tensor or not q.is_cpu or torch.compiler.is_compiling():
            return None
        if self.family.rope is None or self.family.style.prescaled or not {"q_norm", "k_norm"} & self._modules.keys():
            return None
        gradients = torch.is_grad_enabled()
        if self.config._attn_implementation in ("hf_qknorm", implementations.CPP.name):
            # Training waits for the compiler, as its attention does.
            if not cpu_kernels.is_ready() and cpu_kernels.why_not_here(wait=gradients) is not None:
                return None
        elif gradients or cache is None or q.shape[2] > 1 or not cpu_kernels.is_ready():
            return None
        cpu = torch.device("cpu")
        q_norm, k_norm = self._kernel_norm("q_norm", cpu), self._kernel_norm("k_norm", cpu)
        if q_norm is None or k_norm is None or q_norm.kind == k_norm.kind == "none":  # bypassed: the model's own RoPE
            return None
        return q_norm, k_norm

    def _fits_one_kernel(self, heads: Heads, mask: Tensor | None, cache: Any, slot: Any) -> bool:
        """Whether one kernel can norm, rotate and attend: there are no other keys, and no observer of the heads."""
        reordered = mask is not None and is_padded_ranges(mask)  # keys move, after their rotation
        padded = heads.v.shape[-1] > heads.k.shape[-1]  # a norm would see the padding
        alone = cache is None or caches.is_empty(cache, slot)
        return alone and not padded and not reordered and not self.observers

    def _fits_a_step(self, heads: Heads, mask: Tensor | None, options: dict[str, Any]) -> bool:
        """Whether kernels can norm, rotate, write to a cache and attend, if it has room."""
        if torch.is_grad_enabled() or self.observers or heads.v.shape != heads.k.shape or options["dropout"] > 0:
            return False
        # Without a mask, many queries mean that the cache is empty but for the new keys. Ranges with padding, as in a
        # trace, do not fit: keys would be copied before the new ones are written.
        return heads.q.shape[2] == 1 if mask is None else is_ranges(mask)

    def _for_kernels(self, name: str, x: Tensor) -> tuple[Tensor, Norm]:
        """x and the norm that the kernel applies to it; a norm that it can't apply is applied here."""
        norm = self._kernel_norm(name, x.device)
        return (self.normed(name, x), Norm()) if norm is None else (self._before_norm(name, x), norm)

    def _kernel_norm(self, name: str, device: torch.device) -> Norm | None:
        """The norm of that name on a device, the identity without one; None if its hooks do not end before it."""
        module: Any = self._modules.get(name)
        norm = active_copy(module)
        if norm is None:
            return Norm()
        if not is_unhooked(norm) or not is_unhooked(module):
            return None
        if type(norm) is nn.Identity:  # it has hooks of an observer
            return Norm()
        return norm.as_norm(device) if type(norm) is HeadNorm else None

    def _before_norm(self, name: str, x: Tensor) -> Tensor:
        """Heads `[B, H, T, D]`, after the hooks before the norm of that name."""
        module = self._modules.get(name)
        for norm in dict.fromkeys((module, active_copy(module))):
            if norm is not None and norm._forward_pre_hooks:
                x = run_pre_hooks(norm, x.transpose(1, 2)).transpose(1, 2)
        return x


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
        cos, sin = (x[..., ::2] if rope == "pairs" else x[..., : width // 2] for x in (cos, sin))
    return Rotary(cos, sin, rope in ("pairs", "pairs_by_halves"))
