"""`QKNormAttention`, the shared attention forward with its kernels, and its installation in a model."""

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

from hf_qknorm.backends import choice, functions
from hf_qknorm.backends.caches import is_empty, static_layer
from hf_qknorm.backends.calls import is_padded_ranges
from hf_qknorm.families import FAMILIES, Family, known_families
from hf_qknorm.families.class_names import PREFIX
from hf_qknorm.model.accelerate_hooks import set_module_class
from hf_qknorm.model.additions import NORM_FIELDS, add_parameters, device_and_dtype
from hf_qknorm.model.config_checks import no_attention_error
from hf_qknorm.model.head_bias import HEAD_BIASES, HeadBias, scaled_norm
from hf_qknorm.model.knee_state_dict import KneeStateDict
from hf_qknorm.model.norms import HeadNorm, is_unhooked
from hf_qknorm.model.plain_attention import PlainAttention, active_module
from hf_qknorm.ops.types import Heads, Norm, Rotary
from hf_qknorm.scheme import SCHEMES, Scheme


class QKNormAttention(KneeStateDict, PlainAttention):
    """The shared attention forward, with norm, RoPE and attention in one kernel where the backend has it."""

    def _norm_rotate_attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, positions: Any, cache: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        if self.family.rope is None or not functions.takes_raw_heads(self, Heads(q, k, v), mask, options):
            return super()._norm_rotate_attend(q, k, v, mask, positions, cache, options)
        (q, q_norm), (k, k_norm) = self._queries_for_kernels(q), self._for_kernels("k_norm", k)
        rotary = kernel_rotary(positions, self.family.rope)
        heads = Heads(q.to(v.dtype), k.to(v.dtype), v, q_norm, k_norm, rotary)  # a model's own norm may promote them
        slot: Any = None if cache is None else self.family.style.slot(self, **options)
        if self.scheme.length_scale is None and self._fits_one_kernel(heads, mask, cache, slot):
            if cache is not None:
                cache.update(choice.norm_rope_one(self, heads.k, k_norm, rotary), v, slot)
            return functions.attend_raw(self, heads, mask, **options)
        static = None if torch.is_grad_enabled() or v.shape != k.shape else static_layer(cache, slot, heads.k)
        observed = self.scheme.length_scale is not None or self.observers
        if static is not None and not observed and functions.takes_step(heads.q, mask, options):
            return functions.attend_step(self, heads, static, mask, **options)
        q, k = choice.norm_rope(self, heads)
        q = self._length_scaled(q, options)
        if cache is not None:
            k, v = cache.update(k, v, slot)
        return self._call_backend(q, k, v, mask, options)

    def _fits_one_kernel(self, heads: Heads, mask: Tensor | None, cache: Any, slot: Any) -> bool:
        """Whether one kernel can norm, rotate and attend: there are no other keys, and no observer of the heads."""
        reordered = mask is not None and is_padded_ranges(mask)  # keys move, after their rotation
        padded = heads.v.shape[-1] > heads.k.shape[-1]  # a norm would see the padding
        alone = cache is None or is_empty(cache, slot)
        return alone and not padded and not reordered and not self.observers

    def _queries_for_kernels(self, q: Tensor) -> tuple[Tensor, Norm]:
        """q and the norm that the kernel applies to it, with the temperature in the norm's gain, or else in q."""
        x, norm = self._for_kernels("q_norm", q)
        if self.scheme.temperature is None:
            return x, norm
        if norm.kind == "none":
            return self._tempered(x), norm
        if norm.blend is None:
            return x, scaled_norm(norm, self.head_bias("temperature").factor(), x.shape[-1])
        return self._tempered(self.normed("q_norm", q)), Norm()

    def _for_kernels(self, name: str, x: Tensor) -> tuple[Tensor, Norm]:
        """x and the norm that the kernel applies to it.

        A norm over all heads, of another class, or with hooks is applied here.
        """
        module: Any = self._modules.get(name)
        norm = active_module(module)
        if type(norm) is HeadNorm and not norm.wide and is_unhooked(norm) and is_unhooked(module):
            return x, norm.as_norm()
        return self.normed(name, x), Norm()


@cache
def attention_class(base: Any, family: Family) -> type[QKNormAttention]:
    """The subclass of a model's attention class that runs the shared forward."""
    modelling = importlib.import_module(base.__module__)
    namespace = {"base_class": base, "family": family, "modelling": modelling, "__module__": __name__}
    return type(_class_name(family), (QKNormAttention, base), namespace)


def _class_name(family: Family) -> str:
    """The class's name: CLIP's text and image models share an attention class, and only the first is causal."""
    return f"{PREFIX}{family.attention}" if family.causal else f"{PREFIX}Encoder{family.attention}"


def __getattr__(name: str) -> type[QKNormAttention]:
    """Return `QKNormLlamaAttention` and the like, so that a patched model can be unpickled."""
    for model_type in known_families():
        family = FAMILIES[model_type]
        modelling = _modelling(model_type) if name == _class_name(family) else None
        if modelling is not None and hasattr(modelling, family.attention):
            return attention_class(getattr(modelling, family.attention), family)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _modelling(model_type: str) -> ModuleType | None:
    """Import the modelling file of a model type; None for a type that uses another's, as InternLM 3 uses Llama's."""
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


def require_patched(model: Any) -> dict[str, QKNormAttention]:
    """The patched attention modules in `model`, by name. Raises ValueError for a model without any."""
    if layers := patched_layers(model):
        return layers
    raise ValueError(
        f"{type(model).__name__} is not patched: call patch_model(model, scheme) first. "
        'The scheme "none" changes nothing'
    )


def install(model: nn.Module, family: Family, scheme: Scheme) -> None:
    """Patch every attention module of `model` in place, with fresh norms, except for those that are patched already.

    Raises ValueError for a model without attention modules: it would be saved as a patched one.
    """
    for name, module in own_layers(model, family).items():
        base: Any = type(module)
        set_module_class(module, attention_class(base, family))
        if family.own_cap and (own := getattr(module.config, "qk_norm_base", None)) is not None:
            module.attn_logit_softcapping = own["attn_logit_softcapping"]  # a loaded config holds the scheme's
        module.scheme = scheme
        add_parameters(module, scheme)
        if (getattr(module.config, "qk_norm_blend", None) or {}).get("norms"):
            start_blend(module)
        if not scheme.pre_norm:
            parent = _parent(model, name)
            module.removed_norm = (getattr(parent, family.pre_norm),)
            setattr(parent, family.pre_norm, nn.Identity())
    if not patched_layers(model):
        raise no_attention_error(model, family.attention)


def uninstall(model: nn.Module) -> None:
    """Undo `install`, in place."""
    for name, module in patched_layers(model).items():
        for name in (*head_norms(module), *head_biases(module)):
            delattr(module, name)
        vars(module).pop("blending", None)
        if module.removed_norm:
            setattr(_parent(model, name), module.family.pre_norm, _removed_norm(module))
            del module.removed_norm
        vars(module).pop("scheme", None)  # absent if `install` failed before
        set_module_class(module, module.base_class)


def head_norms(layer: QKNormAttention) -> dict[str, HeadNorm]:
    """The scheme's norms in the layer by their names in `NORM_FIELDS`.

    Under PEFT's `modules_to_save` each is the active adapter's copy, or the original where none is active.
    """
    modules = {name: active_module(layer._modules.get(name)) for name in NORM_FIELDS}
    return {name: module for name, module in modules.items() if isinstance(module, HeadNorm)}


def head_biases(layer: QKNormAttention) -> dict[str, HeadBias]:
    """The scheme's learned numbers of heads in the layer by name; under PEFT as with `head_norms`."""
    modules = {name: active_module(layer._modules.get(name)) for name in HEAD_BIASES}
    return {name: module for name, module in modules.items() if isinstance(module, HeadBias)}


def norm_copies(layer: QKNormAttention) -> dict[str, list[HeadNorm]]:
    """The scheme's norms in the layer by name, each with the copies of PEFT's adapters."""
    modules = {name: layer.get_submodule(name).modules() for name in head_norms(layer)}
    return {name: [m for m in copies if isinstance(m, HeadNorm)] for name, copies in modules.items()}


def start_blend(layer: QKNormAttention) -> None:
    """Give the layer's norms a blend of 0: the layer then computes as before, with the model's own scale.

    Raises ValueError for a scheme's scale or length scale without a norm of q or k to carry it until `end_blend`.
    """
    norms = norm_copies(layer)
    factor = layer.logit_scale / layer.own_scale
    side = "q" if "q_norm" in norms else "k"
    carriers = [copy for name, copies in norms.items() if NORM_FIELDS[name] == side for copy in copies]
    for carrier in carriers:
        carrier.rescale = factor
    if not carriers and (factor != 1 or layer.scheme.length_scale is not None):
        field = f"scale={layer.scheme.scale:g}" if factor != 1 else f"length_scale={layer.scheme.length_scale}"
        raise ValueError(f"a blend can't bring in {field} without a norm on queries or keys")
    device, _ = device_and_dtype(layer)
    for norm in chain(*norms.values()):
        norm.blend = torch.zeros((), device=device)
    layer.blending = True


def end_blend(layer: QKNormAttention) -> None:
    """Remove the blend from the layer's norms."""
    for norm in chain(*norm_copies(layer).values()):
        norm.blend, norm.rescale = None, 1.0
    vars(layer).pop("blending", None)


def require_base(model: nn.Module) -> None:
    """Raise ValueError if the scheme folded norms away and the model was loaded from a checkpoint, without them."""
    if any(not layer.scheme.pre_norm and not layer.removed_norm for layer in patched_layers(model).values()):
        raise ValueError(
            "this model was loaded from a checkpoint whose scheme folded the norms in front of attention into the "
            "projections (pre_norm=False): the model before is not known any more. Load the original checkpoint"
        )


@contextmanager
def as_unpatched(model: nn.Module) -> Iterator[None]:
    """A context in which the model computes as before it was patched, with the same weights.

    Folded norms leave outputs that differ by rounding. Raises ValueError as `require_base` does.
    """
    require_base(model)
    changes: list[tuple[Any, str, Any]] = []
    for name, layer in patched_layers(model).items():
        changes += [(parameter, "data", base) for parameter, base in layer.base_weights]
        changes += [(norm, "bypass", True) for norm in chain(*norm_copies(layer).values())]
        changes.append((layer, "scheme", SCHEMES["none"]))
        if layer.removed_norm:
            changes.append((_parent(model, name), layer.family.pre_norm, _removed_norm(layer)))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _removed_norm(layer: QKNormAttention) -> nn.Module:
    """The norm that the scheme removed, on the layer's device: it is no submodule, so that `to` does not move it."""
    weight = next(layer.parameters())
    return layer.removed_norm[0] if weight.is_meta else layer.removed_norm[0].to(weight.device, weight.dtype)


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
