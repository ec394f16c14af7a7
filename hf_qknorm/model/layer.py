"""`QKNormAttention`: the attention forward that all families share."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from hf_qknorm.attend import functions, servers
from hf_qknorm.attend.calls import check_keys
from hf_qknorm.families import Family
from hf_qknorm.families.style import add_to_cache
from hf_qknorm.model import raw_heads
from hf_qknorm.scheme import SCHEMES, Scheme

NONE = SCHEMES["none"]


class QKNormAttention(nn.Module):
    """Mixed into a model's own attention class: project → norm → RoPE → cache → attention function → output.

    The norms see the projections' whole output, adapters included, and come before RoPE and the cache. With the scheme
    "none" it does the operations of the model's own forward, on the same memory layout.

    In a model that takes a cap alone the model's own forward runs (`runs_own_forward`), and the attention functions of
    hf_qknorm read cap and observers from the module.
    """

    base_class: ClassVar[type[nn.Module]]
    modelling: ClassVar[ModuleType]
    family: ClassVar[Family]
    scheme: Scheme
    removed_norm: tuple[nn.Module, ...] = ()  # in a tuple it is no submodule, and checkpoints leave it out
    observers: tuple[Callable[..., None], ...] = ()  # oldest first
    runs_own_forward: bool = False  # set where the layer is patched

    config: Any
    attn_logit_softcapping: float | None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Any = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states `[B, T, C]` to `[B, T, C]` and the attention weights or None.

        `layer_past` is GPT-NeoX's name for `past_key_values`. With `key_value_states` `[B, S, C]`, of an encoder, it
        is cross-attention. Other arguments are passed to the attention function.
        """
        style, cache = self.family.style, layer_past if past_key_values is None else past_key_values
        states = kwargs.pop("key_value_states", None)
        taken = {name: kwargs.pop(name, None) for name in style.arguments}
        options = kwargs | self.attention_options()
        backend: str = self.config._attn_implementation  # once: to read a config takes as long as a small operator
        if states is not None:
            out, weights = attend_across(self, hidden_states, states, attention_mask, cache, options)
            return style.output(self, out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

        q, k, v, *rest = style.project(self, hidden_states, **taken)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        positions = position_embeddings if style.rotates(self) else None
        cache = getattr(cache, "self_attention_cache", cache)  # of an encoder-decoder's, the decoder's
        if style.parts is None:
            if backend in servers.SERVER_BACKENDS:
                servers.check_heads(self, q, k, v, options)
            v = self.normed("v_norm", v)
        if cache is None and isinstance(attention_mask, Tensor):
            check_keys(attention_mask, q.shape[2])

        found: tuple[Tensor, Tensor | None] | None
        found = raw_heads.fused_attention(self, backend, q, k, v, attention_mask, positions, cache, options)
        if found is None:
            q, k, v = self.norm_rotate(q, k, v, positions, cache, options)
            if cache is not None and k.shape[2]:  # a layer that shares another's keys has none
                k, v = add_to_cache(cache, k, v, style.slot(self, **options), options)
            if style.expand is not None:
                k, v = style.expand(self, k, v, **options)
            if not q.dtype == k.dtype == v.dtype:  # a cache may hold another one
                q, k = q.to(v.dtype), k.to(v.dtype)
            found = functions.attend(self, backend, q, k, v, attention_mask, options)
        out, weights = found
        return style.output(self, out.reshape(*hidden_states.shape[:-1], -1).contiguous(), *rest), weights

    def norm_rotate(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and rotate q `[B, H, T, D]` and k `[B, Hk, T, D]`: by a kernel, or by the norms and the model's RoPE."""
        style = self.family.style
        if not style.prescaled and (made := raw_heads.norm_rotate(self, q, k, v, positions)) is not None:
            return *made, v
        if style.parts is None:
            q, k = self.normed("q_norm", q), self.normed("k_norm", k)
        if style.prescaled:
            q, options["scaling"] = q * self.logit_scale, 1.0
        q, k, v = style.rotate(self, q, k, v, positions, past_key_values=cache, **options)
        if not q.dtype == k.dtype == v.dtype:  # under autocast, fp32 gains or cos and sin promote them
            q, k = q.to(v.dtype), k.to(v.dtype)
        return q, k, v

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return PyTorch's state dict. In a sharded layer on the meta device, knees are replicated DTensors.

        accelerate's `fsdp_cpu_ram_efficient_loading` reads the mesh of each tensor, buffers too, to send it there.
        """
        state = super().state_dict(*args, **kwargs)
        mesh: Any = next((p.device_mesh for p in self.parameters() if isinstance(p, DTensor) and p.is_meta), None)
        prefix = kwargs.get("prefix", "")
        for key in [key for key in state if key.startswith(prefix) and key.endswith(".knee")] if mesh else ():
            state[key] = DTensor.from_local(state[key].to("meta"), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return state

    def attention_options(self) -> dict[str, Any]:
        """The layer's own options of the attention function."""
        options: dict[str, Any] = {"scaling": self.logit_scale, "sliding_window": self.window}
        options["dropout"] = self.family.style.dropout(self) if self.training else 0.0
        if (softcap := self.softcap) is not None:
            options["softcap"] = softcap
        if "sinks" in self._parameters or "sinks" in vars(self):  # hasattr takes as long as a small operator
            options["s_aux"] = self.sinks
        return options

    def normed(self, name: str, x: Tensor) -> Tensor:
        """Apply the scheme's norm of that name to x `[B, H, T, D]`, if there is one."""
        if (norm := self._modules.get(name)) is None:
            return x
        made = raw_heads.normed(norm, x)
        return norm(x.transpose(1, 2)).transpose(1, 2) if made is None else made

    @property
    def is_unchanged(self) -> bool:
        """Whether the model's own forward computes the layer: with the scheme "none", by transformers' functions.

        Attention functions of hf_qknorm get the layer's window from the shared forward, and observers its heads.
        """
        if self.scheme is not NONE or self.observers:
            return False
        return not str(self.config._attn_implementation).startswith("hf_qknorm")

    def check_own_forward(self, options: dict[str, Any]) -> None:
        """Raise ValueError for an attention function that would drop the cap: the model's own forward passes none."""
        backend: str = self.config._attn_implementation
        if self.scheme.softcap is not None:
            functions.check_cap_backend(backend, self.scheme.softcap, own_forward=True)
        if backend in servers.SERVER_BACKENDS:
            servers.check_settings(self, {"scaling": self.own_scale} | options)

    @property
    def has_own_norms(self) -> bool:
        """Whether the model norms its queries and keys by itself, in the style's projection."""
        return self.family.has_norms(self.config)

    @property
    def softcap(self) -> float | None:
        """The cap on the logits: the scheme's, or else the model's own."""
        if self.scheme.softcap is not None or not self.family.own_cap:  # other families do not apply their own
            return self.scheme.softcap
        return self.attn_logit_softcapping

    @property
    def logit_scale(self) -> float:
        """The factor of q·k: the scheme's scale, or the model's own where there is none."""
        return self.own_scale if self.scheme.scale is None else self.scheme.scale

    @property
    def own_scale(self) -> float:
        """The model's own factor of q·k."""
        return self.family.style.scale(self)

    @property
    def window(self) -> int | None:
        """The layer's sliding window; None for a layer without one, even if the config has it."""
        return getattr(self.config, "sliding_window", None) if self.family.slides(self) else None

    def extra_repr(self) -> str:
        scale = "" if self.runs_own_forward else f"scale={self.logit_scale:g}"
        cap = "" if self.softcap is None else f"softcap={self.softcap:g}"
        return ", ".join(filter(None, (scale, cap)))


def attend_across(
    layer: Any, hidden_states: Tensor, states: Tensor, mask: Tensor | None, cache: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Attend from hidden_states `[B, T, C]` to the encoder's `[B, S, C]`: `[B, T, H, D]`, and the weights or None.

    The norms are self-attention's own, and come before the cache: a cache of an encoder-decoder stores the normed
    keys at its first call, and later calls read them.
    """
    style, slot = layer.family.style, layer.family.style.slot(layer, **options)
    filled = getattr(cache, "is_updated", None)  # by layer, in the cache of an encoder-decoder
    stored = getattr(cache, "cross_attention_cache", cache)
    again = bool(filled is not None and filled.get(slot))
    q, k, v = style.project_across(layer, hidden_states, None if again else states)
    q = layer.normed("q_norm", q.transpose(1, 2))
    if again:
        k, v = stored.layers[slot].keys, stored.layers[slot].values
    else:
        k, v = layer.normed("k_norm", k.transpose(1, 2)), layer.normed("v_norm", v.transpose(1, 2))
        if stored is not None:
            k, v = add_to_cache(stored, k.to(v.dtype), v, slot, options)
        if filled is not None:
            filled[slot] = True
    options = options | {"is_causal": False}
    if style.prescaled:
        q, options = q * layer.logit_scale, options | {"scaling": 1.0}
    q, k = q.to(v.dtype), k.to(v.dtype)
    return functions.attend(layer, layer.config._attn_implementation, q, k, v, mask, options)
