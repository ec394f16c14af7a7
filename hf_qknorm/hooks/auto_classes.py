"""Registration of the derived classes with transformers' Auto classes, by name.

No model file is imported. The Auto classes look a class name up in the module that `_modules` maps its model type to;
`hf_qknorm.model.derived` is that module, and creates a class on its first look-up.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES, model_type_to_module_name
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING,
    TOKENIZER_MAPPING_NAMES,
)

from hf_qknorm.families import known_types
from hf_qknorm.families.class_names import AUTO_CLASSES, PREFIX, TYPE_PREFIX, classes_of


class _LateModule(ModuleType):
    """Stands for `hf_qknorm.model.derived` until one of its classes is looked up."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("hf_qknorm.model.derived"), name)


def add_model_types(modeling_auto: Any) -> None:
    """Register every family's derived config and models with transformers' Auto classes."""
    derived = _LateModule("hf_qknorm.model.derived")
    mappings = [*(getattr(modeling_auto, auto)._model_mapping for auto in AUTO_CLASSES), TOKENIZER_MAPPING]
    for model_type in known_types():
        derived_type, config = f"{TYPE_PREFIX}{model_type}", f"{PREFIX}{CONFIG_MAPPING_NAMES[model_type]}"
        CONFIG_MAPPING_NAMES[derived_type] = config
        for mapping in (CONFIG_MAPPING, *mappings):
            mapping._modules[model_type_to_module_name(derived_type)] = derived
        for mapping in mappings:
            mapping._reverse_config_mapping[config] = derived_type
        if tokenizer := TOKENIZER_MAPPING_NAMES.get(model_type):
            TOKENIZER_MAPPING_NAMES[derived_type] = tokenizer
        if model_type in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
            MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.add(derived_type)
        for auto, own in classes_of(model_type).items():  # of several classes, transformers selects by `architectures`
            first, *others = (f"{PREFIX}{name}" for name in own)
            AUTO_CLASSES[auto][derived_type] = (first, *others) if others else first


def add_processors(auto: Any) -> None:
    """Let a module of transformers' Auto classes find the processors of every derived type by its base type."""
    tables = [x for x in vars(auto).values() if hasattr(x, "_reverse_config_mapping")]
    for model_type in known_types():
        for table in tables:
            table._reverse_config_mapping[f"{PREFIX}{CONFIG_MAPPING_NAMES[model_type]}"] = model_type


def add_derived(table: dict[str, Any]) -> None:
    """Give every derived model type the entry of its base, in a table of another library that is keyed by type."""
    table.update({f"{TYPE_PREFIX}{known}": table[known] for known in known_types() if known in table})
