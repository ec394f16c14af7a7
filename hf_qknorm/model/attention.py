"""The attention class of each model type, made of its own class and `QKNormAttention`, and the patched layers."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from torch import nn
from transformers.models.auto.configuration_auto import model_type_to_module_name

from hf_qknorm.families import CAPPED, FAMILIES, Family, known_families
from hf_qknorm.families.class_names import PREFIX, made_once
from hf_qknorm.families.style import CACHE
from hf_qknorm.model.layer import QKNormAttention as QKNormAttention
from hf_qknorm.model.norms import NORM_FIELDS, HeadNorm, active_copy

MODELS: Final = "transformers.models"


def calls_interface(module: nn.Module) -> bool:
    """Whether the module computes attention by a function of transformers' attention interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


@made_once
def attention_class(base: Any, family: Family) -> type[QKNormAttention]:
    """The subclass of a model's attention class that runs the shared forward, or the model's own."""
    modelling, adapter = importlib.import_module(base.__module__), family.style.forward
    names = [*inspect.signature(base.forward).parameters][2:]  # behind the module and the hidden states

    @wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.runs_own_forward:
            self.check_own_forward(kwargs)
        if self.runs_own_forward or self.is_unchanged:
            return base.forward(self, *args, **kwargs)
        if adapter is None and len(args) > 1:  # the model's own forward has another order
            args, kwargs = args[:1], {**dict(zip(names, args[1:], strict=False)), **kwargs}
        if CACHE in kwargs:
            kwargs["past_key_values"] = kwargs.pop(CACHE)
        if adapter is None:
            return QKNormAttention.forward(self, *args, **kwargs)
        return adapter(partial(QKNormAttention.forward, self), self, *args, **kwargs)

    namespace = {"base_class": base, "family": family, "modelling": modelling, "forward": forward}
    name = _class_name(base.__name__, family, modelling.__name__)
    return type(name, (QKNormAttention, base), namespace | {"__module__": __name__})


def _class_name(name: str, family: Family, modelling: str) -> str:
    """The class's name.

    CLIP's text and image models share an attention class, and only the first is causal. Some models call theirs
    `Attention`: the name then begins with their package's, as that of a class outside of `FAMILIES` does.
    """
    if not family.attention:
        return f"{PREFIX}_{modelling.split('.')[-2]}_{name}"
    package = modelling.split(".")[-2].title() if name in ("Attention", "MultiHeadAttention") else ""
    return f"{PREFIX}{package}{name}" if family.causal else f"{PREFIX}Encoder{name}"


def __getattr__(name: str) -> type[QKNormAttention]:
    """Return `QKNormLlamaAttention` and the like, so that a patched model can be unpickled."""
    if (found := re.fullmatch(rf"{PREFIX}_([a-z0-9_]+?)_([A-Z]\w*)", name)) and find_spec(f"{MODELS}.{found[1]}"):
        package = importlib.import_module(f"{MODELS}.{found[1]}")
        files = [x.name for x in pkgutil.iter_modules(package.__path__) if x.name.startswith("modeling_")]
        modules = (importlib.import_module(f"{package.__name__}.{file}") for file in files)
        return attention_class(next(vars(x)[found[2]] for x in modules if found[2] in vars(x)), CAPPED)
    for model_type in known_families():
        family = FAMILIES[model_type]
        modelling = modelling_file(model_type) if name.endswith(family.attention) else None
        if modelling is None or name != _class_name(family.attention, family, modelling.__name__):
            continue
        if hasattr(modelling, family.attention):
            return attention_class(getattr(modelling, family.attention), family)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def modelling_file(model_type: str) -> ModuleType | None:
    """Import the modelling file of a model type; None for a type that uses another's, as InternLM 3 uses Llama's."""
    package = model_type_to_module_name(model_type)
    files = (f"{MODELS}.{package}.modeling_{x}" for x in (package, model_type.replace("-", "_")))
    found = next(filter(find_spec, files), None)
    return importlib.import_module(found) if found else None


def patched_layers(model: nn.Module) -> dict[str, QKNormAttention]:
    """The patched attention modules in `model`, by name. Raises TypeError for what is no model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"got a {type(model).__name__}, expected a model")
    return {name: m for name, m in model.named_modules() if isinstance(m, QKNormAttention)}


def require_patched(model: Any) -> dict[str, QKNormAttention]:
    """The patched attention modules in `model`, by name. Raises ValueError for a model without any."""
    if layers := patched_layers(model):
        return layers
    raise ValueError(
        f"{type(model).__name__} is not patched: call patch_model(model, scheme) first. "
        'The scheme "none" changes nothing'
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for the duration; each module then has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def head_norms(layer: QKNormAttention) -> dict[str, HeadNorm]:
    """The scheme's norms in the layer by their names in `NORM_FIELDS`.

    Under PEFT's `modules_to_save` and LN tuning each is the active adapter's copy, or the original without one.
    """
    modules = {name: active_copy(layer._modules.get(name)) for name in NORM_FIELDS}
    return {name: module for name, module in modules.items() if isinstance(module, HeadNorm)}


def norm_copies(layer: QKNormAttention) -> dict[str, list[HeadNorm]]:
    """The scheme's norms in the layer by name, each with the copies of PEFT's adapters."""
    modules = {name: layer.get_submodule(name).modules() for name in head_norms(layer)}
    return {name: [m for m in copies if isinstance(m, HeadNorm)] for name, copies in modules.items()}


def every_norm(model: nn.Module) -> list[HeadNorm]:
    """The scheme's norms in a patched model, with the copies of PEFT's adapters."""
    layers = patched_layers(model).values()
    return [norm for layer in layers for copies in norm_copies(layer).values() for norm in copies]
