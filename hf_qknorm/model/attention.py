"""The installation of `QKNormAttention` in a model, and its classes for each model type."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial, wraps
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers.models.auto.configuration_auto import model_type_to_module_name

from hf_qknorm.families import FAMILIES, Family, known_families
from hf_qknorm.families.class_names import PREFIX
from hf_qknorm.families.style import CACHE
from hf_qknorm.model.accelerate_hooks import set_module_class
from hf_qknorm.model.additions import NORM_FIELDS, add_norms, device_and_dtype
from hf_qknorm.model.config_checks import no_attention_error
from hf_qknorm.model.kernel_attention import QKNormAttention as QKNormAttention
from hf_qknorm.model.norms import HeadNorm, active_copy
from hf_qknorm.model.plain_attention import NONE, PlainAttention
from hf_qknorm.scheme import Scheme


@cache
def attention_class(base: Any, family: Family) -> type[QKNormAttention]:
    """The subclass of a model's attention class that runs the shared forward."""
    modelling, adapter = importlib.import_module(base.__module__), family.style.forward

    @wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_unchanged:
            return base.forward(self, *args, **kwargs)
        if CACHE in kwargs:
            kwargs["past_key_values"] = kwargs.pop(CACHE)
        if adapter is None:
            return PlainAttention.forward(self, *args, **kwargs)
        return adapter(partial(PlainAttention.forward, self), self, *args, **kwargs)

    namespace = {"base_class": base, "family": family, "modelling": modelling, "forward": forward}
    return type(_class_name(family, modelling.__name__), (QKNormAttention, base), namespace | {"__module__": __name__})


def _class_name(family: Family, modelling: str) -> str:
    """The class's name.

    CLIP's text and image models share an attention class, and only the first is causal. Some models call theirs
    `Attention`: the name then begins with that of their package.
    """
    package = modelling.split(".")[-2].title() if family.attention in ("Attention", "MultiHeadAttention") else ""
    return f"{PREFIX}{package}{family.attention}" if family.causal else f"{PREFIX}Encoder{family.attention}"


def __getattr__(name: str) -> type[QKNormAttention]:
    """Return `QKNormLlamaAttention` and the like, so that a patched model can be unpickled."""
    for model_type in known_families():
        family = FAMILIES[model_type]
        modelling = modelling_file(model_type) if name.endswith(family.attention) else None
        if modelling is None or name != _class_name(family, modelling.__name__):
            continue
        if hasattr(modelling, family.attention):
            return attention_class(getattr(modelling, family.attention), family)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def modelling_file(model_type: str) -> ModuleType | None:
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
        if not hasattr(module, "config"):  # the attention function is chosen by it
            module.config, module.config_lent = model.config, True
        module.scheme = NONE if scheme == NONE else scheme  # `is_unchanged` compares with this object
        add_norms(module, scheme)
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
        for added in head_norms(module):
            delattr(module, added)
        vars(module).pop("blending", None)
        if module.removed_norm:
            setattr(_parent(model, name), module.family.pre_norm, _removed_norm(module))
            del module.removed_norm
        vars(module).pop("scheme", None)  # absent if `install` failed before
        if vars(module).pop("config_lent", False):
            del module.config
        set_module_class(module, module.base_class)


def head_norms(layer: QKNormAttention) -> dict[str, HeadNorm]:
    """The scheme's norms in the layer by their names in `NORM_FIELDS`.

    Under PEFT's `modules_to_save` each is the active adapter's copy, or the original where none is active.
    """
    modules = {name: active_copy(layer._modules.get(name)) for name in NORM_FIELDS}
    return {name: module for name, module in modules.items() if isinstance(module, HeadNorm)}


def norm_copies(layer: QKNormAttention) -> dict[str, list[HeadNorm]]:
    """The scheme's norms in the layer by name, each with the copies of PEFT's adapters."""
    modules = {name: layer.get_submodule(name).modules() for name in head_norms(layer)}
    return {name: [m for m in copies if isinstance(m, HeadNorm)] for name, copies in modules.items()}


def start_blend(layer: QKNormAttention) -> None:
    """Give the layer's norms a blend of 0: the layer then computes as before, with the model's own scale.

    Raises ValueError for a scheme's scale without a norm of q or k to carry it until `end_blend`.
    """
    norms = norm_copies(layer)
    factor = layer.logit_scale / layer.own_scale
    side = "q" if "q_norm" in norms else "k"
    carriers = [copy for name, copies in norms.items() if NORM_FIELDS[name] == side for copy in copies]
    for carrier in carriers:
        carrier.rescale = factor
    if not carriers and factor != 1:
        raise ValueError(f"a blend can't bring in scale={layer.scheme.scale:g} without a norm on queries or keys")
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
        changes += [(norm, "bypass", True) for norm in chain(*norm_copies(layer).values())]
        changes.append((layer, "scheme", replace(NONE)))  # not NONE itself: hooks on the norms see their inputs
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
