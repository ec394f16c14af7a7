"""The installation of `QKNormAttention` and its norms in a model, and its removal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_qknorm.families import Family
from hf_qknorm.model.accelerate_hooks import execution_device, set_module_class
from hf_qknorm.model.attention import (
    QKNormAttention,
    attention_class,
    calls_interface,
    every_norm,
    head_norms,
    patched_layers,
)
from hf_qknorm.model.config_checks import no_attention_error
from hf_qknorm.model.layer import NONE
from hf_qknorm.model.norms import NORM_FIELDS, HeadNorm, initial_scalar_gain
from hf_qknorm.scheme import Scheme


def own_layers(model: nn.Module, family: Family) -> dict[str, Any]:
    """The family's unpatched attention modules in `model`, by name.

    Of `CAPPED`, those with the model's own config: the towers of a multimodal model have others.
    """
    modules = {name: m for name, m in model.named_modules() if not isinstance(m, QKNormAttention)}
    if family.attention:
        return {name: m for name, m in modules.items() if type(m).__name__ == family.attention}
    config = type(getattr(model, "config", None))
    return {n: m for n, m in modules.items() if type(getattr(m, "config", None)) is config and calls_interface(m)}


def require_own_forward(model: nn.Module, family: Family) -> dict[str, Any]:
    """The family's attention modules in `model`, by name.

    Refuses a model without any, and one whose attention forward another tool has replaced.
    """
    layers = own_layers(model, family)
    if not layers:
        raise no_attention_error(model, family.attention)
    for name, layer in layers.items():
        replaced = "forward" in vars(layer) and getattr(layer, "_hf_hook", None) is None
        if replaced or not type(layer).forward.__module__.startswith("transformers."):
            raise ValueError(
                f"{name}: another tool has replaced the forward of {family.attention}, and patching would replace it "
                "again. Load the model afresh and patch it first"
            )
    return layers


def install(model: nn.Module, family: Family, scheme: Scheme) -> None:
    """Patch every attention module of `model` in place, with fresh norms, unless it is patched already.

    Raises ValueError for a model without attention modules: it would be saved as a patched one.
    """
    for name, module in own_layers(model, family).items():
        base: Any = type(module)
        set_module_class(module, attention_class(base, family))
        if not hasattr(module, "config"):  # the attention function is chosen by it
            module.config, module.config_lent = model.config, True
        if family.own_cap and (own := getattr(module.config, "qk_norm_base", None)) is not None:
            module.attn_logit_softcapping = own["attn_logit_softcapping"]  # a loaded config holds the scheme's
        module.scheme = NONE if scheme == NONE else scheme  # `is_unchanged` compares with this object
        module.runs_own_forward = family.runs_own_forward(module.config)
        add_norms(module, scheme)
        if not scheme.pre_norm:
            parent = _parent(model, name)
            module.removed_norm = (getattr(parent, family.pre_norm),)
            setattr(parent, family.pre_norm, nn.Identity())
    if not patched_layers(model):
        raise no_attention_error(model, family.attention)


def add_norms(module: Any, scheme: Scheme) -> None:
    """Add the scheme's norms, with fresh values, to a patched attention module."""
    if not scheme.norms:
        return
    style, (device, dtype) = module.family.style, device_and_dtype(module)
    for name, (heads, width) in style.norm_sizes(module).items():
        field = NORM_FIELDS[name]
        norm = getattr(scheme, field)
        if norm is None:
            continue
        gain, initial_gain = True, 1.0
        if scheme.gain == "scalar" and field != "v":  # one g a layer: the queries' norm holds it, if they have one
            gain = field == "q" or scheme.q is None
            initial_gain = initial_scalar_gain(scheme, norm, style.length(module), width, module.logit_scale)
        new = HeadNorm(norm, scheme, heads, width, gain=gain, initial_gain=initial_gain, device=device, dtype=dtype)
        new.own_eps = getattr(module.config, "rms_norm_eps", None)
        setattr(module, name, new)


def device_and_dtype(module: Any) -> tuple[torch.device, torch.dtype]:
    """Device and dtype for new parameters: the projections', or the device on which a hook runs offloaded ones.

    Raises ValueError for a projection without a floating-point weight.
    """
    projection = module.get_submodule(module.family.style.weights[0])
    weight = next(projection.parameters(), None)
    if weight is None or not weight.is_floating_point():
        raise ValueError(
            f"{type(module).__name__}.{module.family.style.weights[0]} ({type(projection).__name__}) has no "
            "floating-point weight, as after quantisation: patch the model in full precision, and quantise it then"
        )
    device = execution_device(projection, module) if weight.is_meta else None
    return device or weight.device, weight.dtype


def uninstall(model: nn.Module) -> None:
    """Undo `install`, in place."""
    for name, module in patched_layers(model).items():
        for added in head_norms(module):
            delattr(module, added)
        vars(module).pop("observers", None)
        if module.removed_norm:
            setattr(_parent(model, name), module.family.pre_norm, module.removed_norm[0])
            del module.removed_norm
        for state in ("scheme", "runs_own_forward"):  # absent if `install` failed before
            vars(module).pop(state, None)
        if vars(module).pop("config_lent", False):
            del module.config
        set_module_class(module, module.base_class)


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
    changes: list[tuple[Any, str, Any]] = [(norm, "bypass", True) for norm in every_norm(model)]
    for name, layer in patched_layers(model).items():
        changes.append((layer, "scheme", replace(NONE)))  # not NONE itself: hooks on the norms see their inputs
        if layer.removed_norm:
            changes.append((_parent(model, name), layer.family.pre_norm, layer.removed_norm[0]))
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
