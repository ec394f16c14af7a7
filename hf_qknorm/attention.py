"""`QKNormAttention`: the one attention forward that every family shares, and how it is put into a model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn

from hf_qknorm import functions
from hf_qknorm.caches import next_positions, static_layer
from hf_qknorm.families import FAMILIES, Family
from hf_qknorm.norms import HeadNorm, fresh_scalar
from hf_qknorm.ops import library
from hf_qknorm.ops.heads import Norm, Rotary
from hf_qknorm.scheme import SCHEMES, Scheme

NORM_NAMES = {"q": "q_norm", "k": "k_norm", "v": "v_norm"}
PREFIX = "QKNorm"


class QKNormAttention(nn.Module):
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
        if functions.kernels_take(self, q, k, v, attention_mask):
            (q, q_norm), (k, k_norm) = self._for_kernels("q_norm", q), self._for_kernels("k_norm", k)
            q, k = q.to(v.dtype), k.to(v.dtype)  # a norm that is not ours may promote them under autocast
            rotary = _angles(position_embeddings, style.interleaved)
            if cache is None and self.observer is None:
                out, weights = functions.fused_attention(
                    self, q, k, v, attention_mask, q_norm, k_norm, rotary, **options
                )
                return style.output(self, out.reshape(*hidden_states.shape[:-1], -1)), weights
            static = None if torch.is_grad_enabled() else static_layer(cache, self.layer_idx, k)
            if static is None:
                q, k = library.norm_rope(q, k, q_norm, k_norm, rotary)
            else:
                places = next_positions(static, k.shape[2])
                q = library.norm_rope_into(q, k, v, static.keys, static.values, places, q_norm, k_norm, rotary)
                k, v, cache = static.keys, static.values, None  # it is up to date
        else:
            q, k = self._normed("q_norm", q), self._normed("k_norm", k)
            if position_embeddings is not None:
                q, k = self.modelling.apply_rotary_pos_emb(q, k, *position_embeddings)
        q, k = q.to(v.dtype), k.to(v.dtype)  # fp32 gains or cos/sin promote them under autocast
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        if self.observer is not None:
            self.observer(self, q, k, v, attention_mask, options)
        attend = functions.attention_function(self, self.scheme.softcap, style.eager(self))
        out, weights = attend(self, q, k, v, attention_mask, **options)
        out = out.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return style.output(self, out), weights

    def _normed(self, name: str, x: Tensor) -> Tensor:
        """x `[B, H, T, D]` through the norm of that name, if there is one."""
        norm = self._modules.get(name)
        return x if norm is None else norm(x.transpose(1, 2)).transpose(1, 2)

    def _for_kernels(self, name: str, x: Tensor) -> tuple[Tensor, Norm]:
        """x and the norm that a kernel is to apply to it; a norm that is not ours, or is watched, is applied here."""
        norm = self._modules.get(name)
        if isinstance(norm, HeadNorm) and norm.bare:
            return x, norm.as_norm()
        return self._normed(name, x), Norm()

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


@cache
def attention_class(base: Any, family: Family) -> type[QKNormAttention]:
    """The subclass of a model's attention class that runs the shared forward."""
    modelling = importlib.import_module(base.__module__)
    namespace = {"base_class": base, "family": family, "modelling": modelling, "__module__": __name__}
    return type(f"{PREFIX}{base.__name__}", (QKNormAttention, base), namespace)


def __getattr__(name: str) -> type[QKNormAttention]:
    """`QKNormLlamaAttention` and the like, so that a patched model can be pickled."""
    for model_type, family in FAMILIES.items():
        if name == f"{PREFIX}{family.attention}":
            modelling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
            return attention_class(getattr(modelling, family.attention), family)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def own_layers(model: nn.Module, family: Family) -> dict[str, Any]:
    """The family's unpatched attention modules in `model`, by name."""
    return {name: m for name, m in model.named_modules() if type(m).__name__ == family.attention}


def patched_layers(model: nn.Module) -> dict[str, QKNormAttention]:
    """The patched attention modules in `model`, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, QKNormAttention)}


def install(model: nn.Module, family: Family, scheme: Scheme) -> None:
    """Patch every attention module of `model`, in place, with fresh norms; what is patched already is left alone."""
    for name, module in own_layers(model, family).items():
        base: Any = type(module)
        _set_class(module, attention_class(base, family))
        if family.own_cap and module.config.qk_norm_base is not None:  # a loaded config has the scheme's cap there
            module.attn_logit_softcapping = module.config.qk_norm_base["attn_logit_softcapping"]
        module.scheme = scheme
        _add_norms(module, scheme)
        if (getattr(module.config, "qk_norm_blend", None) or {}).get("norms"):
            start_blend(module)
        if not scheme.pre_norm:
            parent = model.get_submodule(name.rpartition(".")[0])
            module.removed_norm = (getattr(parent, family.pre_norm),)
            setattr(parent, family.pre_norm, nn.Identity())


def uninstall(model: nn.Module) -> None:
    """Undo `install`, in place."""
    for name, module in patched_layers(model).items():
        for norm in head_norms(module):
            delattr(module, norm)
        vars(module).pop("blending", None)
        if module.removed_norm:
            setattr(model.get_submodule(name.rpartition(".")[0]), module.family.pre_norm, _removed_norm(module))
            del module.removed_norm
        del module.scheme
        _set_class(module, module.base_class)


def head_norms(layer: QKNormAttention) -> dict[str, HeadNorm]:
    """The layer's norms by name: q_norm, k_norm, v_norm, those that the scheme put there."""
    modules = {name: layer._modules.get(name) for name in NORM_NAMES.values()}
    return {name: module for name, module in modules.items() if isinstance(module, HeadNorm)}


def start_blend(layer: QKNormAttention) -> None:
    """Give the layer's norms a blend, at 0: until `end_blend` it computes what it did before, and its own scale holds.

    Raises ValueError for a scale that no norm of q or k can stand for meanwhile.
    """
    norms = head_norms(layer)
    factor = layer.logit_scale / layer.scaling
    carrier = norms.get("q_norm", norms.get("k_norm"))
    if carrier is not None:
        carrier.rescale = factor
    elif factor != 1:
        raise ValueError(f"a blend can't bring in scale={layer.scheme.scale:g} without a norm on queries or keys")
    device, _ = _place(layer)
    for norm in norms.values():
        norm.blend = torch.zeros((), device=device)
    layer.blending = True


def end_blend(layer: QKNormAttention) -> None:
    """Leave the layer's norms as the scheme says, without a trace of the blend."""
    for norm in head_norms(layer).values():
        norm.blend, norm.rescale = None, 1.0
    vars(layer).pop("blending", None)


def require_base(model: nn.Module) -> None:
    """Raise ValueError if the model's scheme folded norms away, which its checkpoint did not keep."""
    if any(not layer.scheme.pre_norm and not layer.removed_norm for layer in patched_layers(model).values()):
        raise ValueError(
            "this model was loaded from a checkpoint whose scheme folded the norms in front of attention into the "
            "projections (pre_norm=False): what it was before is not known any more. Load the original checkpoint"
        )


@contextmanager
def as_unpatched(model: nn.Module) -> Iterator[None]:
    """Within, the model computes what it did before it was patched, through the same weights.

    Norms that the scheme folded away leave rounding behind. Raises ValueError if a checkpoint did not keep them.
    """
    require_base(model)
    layers = patched_layers(model)
    schemes = {name: layer.scheme for name, layer in layers.items()}
    norms = [norm for layer in layers.values() for norm in head_norms(layer).values()]
    parents = {name: model.get_submodule(name.rpartition(".")[0]) for name, m in layers.items() if m.removed_norm}
    moved = [(p, p.data, base) for layer in layers.values() for p, base in layer.base_weights]
    try:
        for p, _, base in moved:
            p.data = base
        for layer in layers.values():
            layer.scheme = SCHEMES["none"]
        for norm in norms:
            norm.bypass = True
        for name, parent in parents.items():
            setattr(parent, layers[name].family.pre_norm, _removed_norm(layers[name]))
        yield
    finally:
        for p, now, _ in moved:
            p.data = now
        for name, layer in layers.items():
            layer.scheme = schemes[name]
        for norm in norms:
            norm.bypass = False
        for name, parent in parents.items():
            setattr(parent, layers[name].family.pre_norm, nn.Identity())


def _removed_norm(module: QKNormAttention) -> nn.Module:
    """The norm that the scheme removed, brought to where the layer is now: it is no submodule, `to` passes it by."""
    place = next(module.parameters())
    return module.removed_norm[0] if place.is_meta else module.removed_norm[0].to(place.device, place.dtype)


def _angles(position_embeddings: tuple[Tensor, Tensor] | None, interleaved: bool) -> Rotary | None:
    """transformers' cos and sin `[B, T, R]`, which hold each angle twice, as the kernels take them."""
    if position_embeddings is None:
        return None
    cos, sin = (x[..., ::2] if interleaved else x[..., : x.shape[-1] // 2] for x in position_embeddings)
    return Rotary(cos, sin, interleaved)


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Swap the module's class. accelerate's hook shadows `forward` on the instance: it comes off meanwhile."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        remove_hook_from_module(module)
        vars(module).pop("forward", None)  # left behind: the old class's, on the instance
    module.__class__ = cls
    if hook is not None:
        add_hook_to_module(module, hook)


def _add_norms(module: QKNormAttention, scheme: Scheme) -> None:
    config = module.config
    heads: int = config.num_attention_heads
    heads_kv: int = heads // getattr(module, "num_key_value_groups", 1)  # a config may say what the model ignores
    head_dim: int = module.head_dim if hasattr(module, "head_dim") else module.head_size
    device, dtype = _place(module)
    for field, name in NORM_NAMES.items():
        norm = getattr(scheme, field)
        if norm is None:
            continue
        gain, fresh = True, 1.0
        if scheme.gain == "scalar" and field != "v":  # one g a layer: the queries hold it where they are normed
            gain = field == "q" or scheme.q is None
            fresh = fresh_scalar(scheme, norm, config.max_position_embeddings, head_dim, module.logit_scale)
        size = heads if field == "q" else heads_kv
        setattr(
            module,
            name,
            HeadNorm(norm, scheme, size, head_dim, gain=gain, fresh=fresh, device=device, dtype=dtype),
        )


def _place(module: QKNormAttention) -> tuple[torch.device, torch.dtype]:
    """Device and dtype for new parameters: the projections', or where a hook runs what it has offloaded."""
    weight = next(module.get_submodule(module.family.style.weights[0]).parameters())
    execution_device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if weight.device.type == "meta" and execution_device is not None:
        return torch.device(execution_device), weight.dtype
    return weight.device, weight.dtype
