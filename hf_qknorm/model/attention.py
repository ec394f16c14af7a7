"""`QKNormAttention`: the shared attention forward with its kernels, and how it is put into a model."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import model_type_to_module_name

from hf_qknorm.backends import functions
from hf_qknorm.backends.caches import count_written, is_empty, next_positions, static_layer
from hf_qknorm.backends.masks import is_padded_ranges
from hf_qknorm.families import FAMILIES, Family, known_families
from hf_qknorm.families.class_names import PREFIX
from hf_qknorm.model.hooks import execution_device, set_class
from hf_qknorm.model.knee_states import KneeStates
from hf_qknorm.model.norms import HeadNorm, fresh_scalar, is_unhooked
from hf_qknorm.model.plain_attention import PlainAttention
from hf_qknorm.model.settings import no_attention
from hf_qknorm.ops import library
from hf_qknorm.ops.types import Heads, Norm, Rotary
from hf_qknorm.scheme import SCHEMES, Scheme

NORM_NAMES = {"q": "q_norm", "k": "k_norm", "v": "v_norm"}


class QKNormAttention(KneeStates, PlainAttention):
    """The shared attention forward, with norm, RoPE and attention in one kernel wherever the backend has it."""

    def _norm_rotate_attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        positions: Any,
        cache: Any,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        heads = Heads(q, k, v)
        if self.family.rope is None or not functions.takes_raw_heads(self, heads, attention_mask, options):
            return super()._norm_rotate_attend(q, k, v, attention_mask, positions, cache, options)
        (q, q_norm), (k, k_norm) = self._for_kernels("q_norm", q), self._for_kernels("k_norm", k)
        rotary = _angles(positions, self.family.rope)
        heads = Heads(q.to(v.dtype), k.to(v.dtype), v, q_norm, k_norm, rotary)  # a model's own norm may promote them
        slot: Any = None if cache is None else self.family.style.slot(self, **options)
        if self._kernel_sees_all(heads, attention_mask, cache, slot):
            if cache is not None:
                cache.update(library.norm_rope_one(heads.k, k_norm, rotary), v, slot)
            return functions.attend_raw(self, heads, attention_mask, **options)
        static = None if torch.is_grad_enabled() or v.shape != k.shape else static_layer(cache, slot, heads.k)
        if static is not None:
            count = k.shape[2]
            q = library.norm_rope_into(heads, static.keys, static.values, next_positions(static, count))
            count_written(static, count)
            return self._call_backend(q, static.keys, static.values, attention_mask, options)
        q, k = library.norm_rope(heads)
        if cache is not None:
            k, v = cache.update(k, v, slot)
        return self._call_backend(q, k, v, attention_mask, options)

    def _kernel_sees_all(self, heads: Heads, attention_mask: Tensor | None, cache: Any, slot: Any) -> bool:
        """Whether one kernel may norm, rotate and attend: no one else needs the normed heads."""
        reordered = attention_mask is not None and is_padded_ranges(attention_mask)  # keys move, after their rotation
        padded = heads.v.shape[-1] > heads.k.shape[-1]  # a norm would see the padding
        alone = cache is None or is_empty(cache, slot)  # there are no other keys
        return alone and not padded and not reordered and self.observer is None

    def _for_kernels(self, name: str, x: Tensor) -> tuple[Tensor, Norm]:
        """x and the norm that the kernel applies to it; a norm of another class, or with hooks, is applied here."""
        module: Any = self._modules.get(name)
        norm = _in_use(module)
        if isinstance(norm, HeadNorm) and norm.bare and (module is norm or is_unhooked(module)):
            return x, norm.as_norm()
        return self._normed(name, x), Norm()


@cache
def attention_class(base: Any, family: Family) -> type[QKNormAttention]:
    """The subclass of a model's attention class that runs the shared forward."""
    modelling = importlib.import_module(base.__module__)
    namespace = {"base_class": base, "family": family, "modelling": modelling, "__module__": __name__}
    return type(_class_name(family), (QKNormAttention, base), namespace)


def _class_name(family: Family) -> str:
    """CLIP's models of text and of images share an attention class, and only the first is causal."""
    return f"{PREFIX}{family.attention}" if family.causal else f"{PREFIX}Encoder{family.attention}"


def __getattr__(name: str) -> type[QKNormAttention]:
    """`QKNormLlamaAttention` and the like, so that a patched model can be pickled."""
    for model_type in known_families():
        family = FAMILIES[model_type]
        modelling = _modelling(model_type) if name == _class_name(family) else None
        if modelling is not None and hasattr(modelling, family.attention):
            return attention_class(getattr(modelling, family.attention), family)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _modelling(model_type: str) -> ModuleType | None:
    """The modelling file of a model type; None for one that has another's, as InternLM 3 has Llama's."""
    package = model_type_to_module_name(model_type)
    files = (f"transformers.models.{package}.modeling_{x}" for x in (package, model_type.replace("-", "_")))
    found = next(filter(importlib.util.find_spec, files), None)
    return importlib.import_module(found) if found else None


def own_layers(model: nn.Module, family: Family) -> dict[str, Any]:
    """The family's unpatched attention modules in `model`, by name."""
    return {name: m for name, m in model.named_modules() if type(m).__name__ == family.attention}


def patched_layers(model: nn.Module) -> dict[str, QKNormAttention]:
    """The patched attention modules in `model`, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, QKNormAttention)}


def install(model: nn.Module, family: Family, scheme: Scheme) -> None:
    """Patch every attention module of `model`, in place, with fresh norms; what is patched already is left alone.

    Raises ValueError for a model that then has no patched module: it would be saved as one with the scheme.
    """
    for name, module in own_layers(model, family).items():
        base: Any = type(module)
        set_class(module, attention_class(base, family))
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
    if not patched_layers(model):
        raise no_attention(model, family.attention)


def uninstall(model: nn.Module) -> None:
    """Undo `install`, in place."""
    for name, module in patched_layers(model).items():
        for norm in head_norms(module):
            delattr(module, norm)
        vars(module).pop("blending", None)
        if module.removed_norm:
            setattr(model.get_submodule(name.rpartition(".")[0]), module.family.pre_norm, _removed_norm(module))
            del module.removed_norm
        vars(module).pop("scheme", None)  # an installation that failed may not have come to it
        set_class(module, module.base_class)


def head_norms(layer: QKNormAttention) -> dict[str, HeadNorm]:
    """The layer's norms by name: q_norm, k_norm, v_norm, those that the scheme put there, and that compute now.

    Under PEFT's `modules_to_save` that is the active adapter's copy, or the original where none is active.
    """
    modules = {name: _in_use(layer._modules.get(name)) for name in NORM_NAMES.values()}
    return {name: module for name, module in modules.items() if isinstance(module, HeadNorm)}


def norm_copies(layer: QKNormAttention) -> dict[str, list[HeadNorm]]:
    """The layer's norms by name, each with every copy of it that PEFT's adapters keep."""
    modules = {name: layer.get_submodule(name).modules() for name in head_norms(layer)}
    return {name: [m for m in copies if isinstance(m, HeadNorm)] for name, copies in modules.items()}


def _in_use(module: Any) -> nn.Module | None:
    """The module, or what PEFT's wrapper around it calls."""
    copies = None if module is None else module._modules.get("modules_to_save")
    if copies is None:
        return module
    active = [] if module.disable_adapters else module.active_adapters
    return copies[active[0]] if active and active[0] in copies else module.original_module


def start_blend(layer: QKNormAttention) -> None:
    """Give the layer's norms a blend, at 0: until `end_blend` it computes what it did before, and its own scale holds.

    Raises ValueError for a scale that no norm of q or k can stand for meanwhile.
    """
    norms = norm_copies(layer)
    factor = layer.logit_scale / layer.own_scale
    carriers = norms.get("q_norm", norms.get("k_norm", []))
    for carrier in carriers:
        carrier.rescale = factor
    if not carriers and factor != 1:
        raise ValueError(f"a blend can't bring in scale={layer.scheme.scale:g} without a norm on queries or keys")
    device, _ = place(layer)
    for norm in chain(*norms.values()):
        norm.blend = torch.zeros((), device=device)
    layer.blending = True


def end_blend(layer: QKNormAttention) -> None:
    """Leave the layer's norms as the scheme says, without a trace of the blend."""
    for norm in chain(*norm_copies(layer).values()):
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
    norms = [norm for layer in layers.values() for norm in chain(*norm_copies(layer).values())]
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


def _angles(positions: tuple[Tensor, Tensor] | None, rope: str | None) -> Rotary | None:
    """A model's cos and sin `[B, T, R]`, which hold each angle twice or `[B, T, R/2]` once, as the kernels take them.

    `rope` is the family's: what turns together are "halves" of the rotated part or "pairs" of neighbours, and the
    angles stand as these do; in "pairs_by_halves" neighbours turn, and the angles stand as halves do; in "once" halves.
    """
    if positions is None:
        return None
    cos, sin = positions
    width = cos.shape[-1]
    if rope != "once":
        cos, sin = (x[..., ::2] if rope == "pairs" else x[..., : width // 2] for x in (cos, sin))
    return Rotary(cos, sin, rope in ("pairs", "pairs_by_halves"))


def _add_norms(module: QKNormAttention, scheme: Scheme) -> None:
    if not scheme.norms:
        return
    heads, heads_kv, head_dim = module.family.style.heads(module)
    device, dtype = place(module)
    for field, name in NORM_NAMES.items():
        norm = getattr(scheme, field)
        if norm is None:
            continue
        gain, fresh = True, 1.0
        if scheme.gain == "scalar" and field != "v":  # one g a layer: the queries hold it where they are normed
            gain = field == "q" or scheme.q is None
            length = module.family.style.length(module)
            fresh = fresh_scalar(scheme, norm, length, head_dim, module.logit_scale)
        size = heads if field == "q" else heads_kv
        width = getattr(module, "v_head_dim", head_dim) if field == "v" else head_dim
        setattr(
            module,
            name,
            HeadNorm(norm, scheme, size, width, gain=gain, fresh=fresh, device=device, dtype=dtype),
        )


def place(module: QKNormAttention) -> tuple[torch.device, torch.dtype]:
    """Device and dtype for new parameters: the projections', or where a hook runs what it has offloaded."""
    projection = module.get_submodule(module.family.style.weights[0])
    weight = next(projection.parameters())
    device = execution_device(projection, module) if weight.is_meta else None
    return device or weight.device, weight.dtype
