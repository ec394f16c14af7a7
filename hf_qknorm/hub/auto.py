"""Registration of the derived classes with transformers' Auto classes.

It imports the configuration files alone; a modelling file is imported when a class of its is first used.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from hf_qknorm.attention import PREFIX
from hf_qknorm.families import known_families
from hf_qknorm.hub.derived import derived_config, named
from hf_qknorm.hub.standalone import AUTO_CLASSES


class _Lazy:
    """Stands for a derived model class in the Auto mappings until it is used, so that registering imports nothing."""

    def __init__(self, name: str, config_class: type[PretrainedConfig]) -> None:
        self.__name__, self.config_class = name, config_class

    def __getattr__(self, name: str) -> Any:
        return getattr(named(self.__name__), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return named(self.__name__)(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, named(self.__name__))


def register() -> None:
    """Register every family's derived config and models with transformers' Auto classes."""
    for model_type in known_families():
        config_class = derived_config(model_type)
        derived_type = config_class.model_type
        transformers.AutoConfig.register(derived_type, config_class, exist_ok=True)
        if tokenizer := TOKENIZER_MAPPING_NAMES.get(model_type):
            TOKENIZER_MAPPING_NAMES[derived_type] = tokenizer
            tokenizer_class = tokenizer_class_from_name(tokenizer)
            transformers.AutoTokenizer.register(config_class, fast_tokenizer_class=tokenizer_class, exist_ok=True)
        if model_type in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
            MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.add(derived_type)
        for auto, names in AUTO_CLASSES.items():
            if model_type in names:
                name = f"{PREFIX}{names[model_type]}"
                names[derived_type] = name  # Trainer and pipelines look class names up here
                getattr(transformers, auto).register(config_class, _Lazy(name, config_class), exist_ok=True)
