"""`PlainAttention`: the one attention forward that every family shares, in PyTorch alone."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor, nn

from hf_qknorm import functions
from hf_qknorm.families import Family
from hf_qknorm.scheme import Scheme


class PlainAttention(nn.Module):
    """Mixed into a model's own attention class: project → norm → RoPE → cache → attention function → output.

    The norms see the projections' whole output (adapters included) and stand before RoPE and the cache. With the
    scheme "none" every operation is the one that the model's own forward does, on the same memory layout.
    """

    base_class: ClassVar[type[nn.Module]]
    modelling: ClassVar[ModuleType]
    family: ClassVar[Family]
    scheme: Scheme
    removed_norm: tuple[nn.Module, ...] = ()  # a tuple, so that it is no submodule and has no place in checkpoints
    observer: Callable[..., None] | None = None
    blending: bool = False
    base_weights: tuple[tuple[nn.Parameter, Tensor], ...] = ()  # what parameters were before a fit moves them

    config: Any
    layer_idx: int
    scaling: float
    head_dim: int
    head_size: int

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states `[B, T, C]` to `[B, T, C]` and the attention weights or None.

        `layer_past` is GPT-NeoX's name for `past_key_values`. Other arguments go on to the attention function.
        """
        style = self.family.style
        q, k, v = (x.transpose(1, 2) for x in style.project(self, hidden_states))
        v = self._normed("v_norm", v)
        cache = layer_past if past_key_values is None else past_key_values
        options = {**kwargs, "scaling": self.logit_scale, "sliding_window": self.window}
        options["dropout"] = style.dropout(self) if self.training else 0.0
        if self.softcap is not None:
            options["softcap"] = self.softcap
        out, weights = self._attend(q, k, v, attention_mask, position_embeddings, cache, options)
        out = out.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return style.output(self, out), weights

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None,
        cache: Any,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Raw q `[B, H, T, D]` and k, and v `[B, Hk, T, D]`, to `[B, T, H, D]` and the weights or None."""
        q, k = self._normed("q_norm", q), self._normed("k_norm", k)
        if position_embeddings is not None:
            q, k = self.modelling.apply_rotary_pos_emb(q, k, *position_embeddings)
        q, k = q.to(v.dtype), k.to(v.dtype)  # fp32 gains or cos/sin promote them under autocast
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        return self._attend_heads(q, k, v, attention_mask, options)

    def _attend_heads(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """The attention function, over heads that are ready for it."""
        if self.observer is not None:
            self.observer(self, q, k, v, attention_mask, options)
        attend = functions.attention_function(self, self.scheme.softcap, self.family.style.eager(self))
        return attend(self, q, k, v, attention_mask, **options)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        """x `[B, H, T, D]` through the norm of that name, if there is one."""
        norm = self._modules.get(name)
        return x if norm is None else norm(x.transpose(1, 2)).transpose(1, 2)

    @property
    def softcap(self) -> float | None:
        """The cap on the logits: the scheme's, or else the one that the model was born with."""
        own: float | None = getattr(self, "attn_logit_softcapping", None)
        return own if self.scheme.softcap is None else self.scheme.softcap

    @property
    def logit_scale(self) -> float:
        """What multiplies q·k: the scheme's scale, or else the model's own, as also until a blend is over."""
        return self.scaling if self.scheme.scale is None or self.blending else self.scheme.scale

    @property
    def window(self) -> int | None:
        """The layer's sliding window: its own attribute where it has one (it may be off), else the config's."""
        config_window = getattr(self.config, "sliding_window", None)
        window: int | None = getattr(self, "sliding_window", config_window)
        return window

    def extra_repr(self) -> str:
        cap = "" if self.softcap is None else f", softcap={self.softcap:g}"
        return f"scale={self.logit_scale:g}{cap}"
