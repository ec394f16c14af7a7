"""The registration of the package with transformers, PEFT and Liger, without their model code or the package's own.

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
from typing import Any, Final

from transformers import PretrainedConfig

from hf_qknorm.families import known_families
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.model import auto
from hf_qknorm.model.adapter_weights import keeps_gains
from hf_qknorm.model.in_memory import configs_by_name, copies_by_name, refuses_names, stores_no_base
from hf_qknorm.model.liger import for_derived, spares_norms

ATTENTION_FUNCTIONS = ("hf_qknorm", "hf_qknorm_triton", "hf_qknorm_cpu", "hf_qknorm_tiled", "hf_qknorm_eager")


def register() -> None:
    """Register attention functions, masks, Auto classes, and the checks of transformers' own and PEFT's classes."""
    auto.register()
    _extend_configs()
    for name, extend in EXTENDED.items():
        if name in sys.modules:
            extend(sys.modules[name])
    sys.meta_path.insert(0, _ExtendingFinder())


class _ExtendingFinder(MetaPathFinder):
    """Finds the modules in `EXTENDED` as Python does, and extends each after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in EXTENDED else None
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                EXTENDED[fullname](module)

            loader.exec_module = exec_module
        return spec


def _extend_configs() -> None:
    """Let the method that every config passes through refuse the settings of a patched checkpoint.

    `AutoConfig` gets the config of a model that was changed in memory by the model's name.
    """
    config: Any = PretrainedConfig
    config.get_config_dict = classmethod(configs_by_name(config.get_config_dict.__func__))
    post_init = config.__post_init__

    @wraps(post_init)
    def checked(self: Any, **kwargs: Any) -> None:
        stored = kwargs.get("model_type")
        if isinstance(stored, str) and stored.startswith(TYPE_PREFIX):
            import_module("hf_qknorm.model.unpatched_classes").check_config(self, kwargs)
        post_init(self, **kwargs)

    config.__post_init__ = checked


def _extend_models(modeling_utils: Any) -> None:
    """Register the attention functions, load them for a model that asks for one, and check the weights of models."""
    for name in ATTENTION_FUNCTIONS:
        modeling_utils.AttentionInterface.register(name, _late("REGISTERED", name))
    model = modeling_utils.PreTrainedModel
    choose, load = model.get_correct_attn_implementation, model._load_pretrained_model

    @wraps(choose)
    def chosen(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested_attention in ATTENTION_FUNCTIONS:
            import_module("hf_qknorm.backends.functions")  # here, since torch.compile can't trace the import
        return choose(self, requested_attention, *args, **kwargs)

    @wraps(load)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return import_module("hf_qknorm.model.unpatched_classes").load_checked(load, *args, **kwargs)

    model.get_correct_attn_implementation, model._load_pretrained_model = chosen, staticmethod(checked)
    model.from_pretrained = classmethod(copies_by_name(model.from_pretrained.__func__))


def _extend_masks(masking_utils: Any) -> None:
    """Register a mask function for each attention function: without one, causality is lost."""
    for name in ATTENTION_FUNCTIONS:
        masking_utils.AttentionMaskInterface.register(name, _late("MASKS", name))


def _late(table: str, name: str) -> Callable[..., Any]:
    """A function that loads the package's own of this name, which then takes its place, and calls it."""
    return lambda *args, **kwargs: getattr(import_module("hf_qknorm.backends.functions"), table)[name](*args, **kwargs)


def _extend_peft(constants: ModuleType) -> None:
    """Give every derived model type the default targets of its base."""
    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_"):
            table.update({f"{TYPE_PREFIX}{known}": table[known] for known in known_families() if known in table})


def _extend_adapters(config: Any) -> None:
    """Keep the name of the unpatched model out of adapters that are trained on a model patched in memory."""
    config.PeftConfigMixin.to_dict = stores_no_base(config.PeftConfigMixin.to_dict)


def _extend_adapter_loading(peft_model: Any) -> None:
    """Let PEFT refuse an adapter with gains for a model without norms, instead of leaving them out."""
    peft_model.set_peft_model_state_dict = keeps_gains(peft_model.set_peft_model_state_dict)


def _extend_auto_adapters(auto: Any) -> None:
    """Let PEFT load an adapter whose config names a derived class: it imports from the packages of a list alone."""
    allowed = getattr(auto, "get_default_import_allowlist", None)  # absent in PEFT 0.18, which imports from any
    if allowed is not None:
        auto.get_default_import_allowlist = lambda: [*allowed(), "hf_qknorm"]


def _extend_liger(monkey_patch: Any) -> None:
    """Give every derived model type the Liger kernels of its base, and keep them off a scheme's norms."""
    table = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    table.update({f"{TYPE_PREFIX}{known}": for_derived(known, table.get(known)) for known in known_families()})
    if hasattr(monkey_patch, "_bind_method_to_module"):
        monkey_patch._bind_method_to_module = spares_norms(monkey_patch._bind_method_to_module)


def _extend_vllm(llm: Any) -> None:
    """Keep TRL's trainers from sampling with the unpatched weights of a model that is patched in memory."""
    llm.LLM.__init__ = refuses_names(llm.LLM.__init__)


EXTENDED: Final[dict[str, Callable[[Any], None]]] = {
    "transformers.modeling_utils": _extend_models,
    "transformers.masking_utils": _extend_masks,
    "peft.utils.constants": _extend_peft,
    "peft.config": _extend_adapters,
    "peft.auto": _extend_auto_adapters,
    "peft.peft_model": _extend_adapter_loading,
    "liger_kernel.transformers.monkey_patch": _extend_liger,
    "vllm.entrypoints.llm": _extend_vllm,
}
