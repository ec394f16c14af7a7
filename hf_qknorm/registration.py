"""The registration of the package with transformers and PEFT, without their model code or the package's own.

transformers' `modeling_utils` takes longer to load than all else here. So its tables get functions that load the
package when they are called, at the end of its import or at once if it is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from transformers import PretrainedConfig

from hf_qknorm.families import known_families
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.model import auto

ATTENTION_FUNCTIONS = ("hf_qknorm", "hf_qknorm_triton", "hf_qknorm_tiled", "hf_qknorm_eager")


def register() -> None:
    """Register attention functions, masks, Auto classes, and the checks of transformers' own and PEFT's classes."""
    auto.register()
    _check_configs()
    callbacks = {
        "transformers.modeling_utils": _extend_models,
        "transformers.masking_utils": _extend_masks,
        "peft.utils.constants": _extend_peft,
    }
    for name, callback in callbacks.items():
        if name in sys.modules:
            callback(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(callbacks))


class _AfterImport(MetaPathFinder):
    """Finds modules as Python does, and calls a function with each after its import."""

    def __init__(self, callbacks: dict[str, Callable[[ModuleType], None]]) -> None:
        self.callbacks = callbacks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self.callbacks else None
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.callbacks[fullname](module)

            loader.exec_module = exec_module
        return spec


def _check_configs() -> None:
    """Let the method that every config passes through refuse the settings of a patched checkpoint."""
    config: Any = PretrainedConfig
    post_init = config.__post_init__

    @wraps(post_init)
    def checked(self: Any, **kwargs: Any) -> None:
        stored = kwargs.get("model_type")
        if isinstance(stored, str) and stored.startswith(TYPE_PREFIX):
            import_module("hf_qknorm.model.unpatched_classes").check_config(self, kwargs)
        post_init(self, **kwargs)

    config.__post_init__ = checked


def _extend_models(modeling_utils: Any) -> None:
    """Register the attention functions, and let the method that loads every model's weights check them."""
    for name in ATTENTION_FUNCTIONS:
        modeling_utils.AttentionInterface.register(name, _late("hf_qknorm.backends.functions", "REGISTERED", name))
    model = modeling_utils.PreTrainedModel
    load = model._load_pretrained_model

    @wraps(load)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return import_module("hf_qknorm.model.unpatched_classes").load_checked(load, *args, **kwargs)

    model._load_pretrained_model = staticmethod(checked)


def _extend_masks(masking_utils: Any) -> None:
    """Register a mask function for each attention function: without one, causality is lost."""
    for name in ATTENTION_FUNCTIONS:
        masking_utils.AttentionMaskInterface.register(name, _late("hf_qknorm.backends.masks", "structured_mask"))


def _late(module: str, attribute: str, key: str | None = None) -> Callable[..., Any]:
    """A function that loads the package's function, which `functions.register` puts in its place, and calls it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        import_module("hf_qknorm.backends.functions")
        found = getattr(import_module(module), attribute)
        return (found if key is None else found[key])(*args, **kwargs)

    return call


def _extend_peft(constants: ModuleType) -> None:
    """Give every derived model type the default targets of its base."""
    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_"):
            table.update({f"{TYPE_PREFIX}{known}": table[known] for known in known_families() if known in table})
