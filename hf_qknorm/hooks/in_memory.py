"""What other libraries do with the name of a model that was changed in memory, instead of loading the model before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from hf_qknorm.model.in_memory import InMemoryName

logger = logging.getLogger("hf_qknorm")


def copy_model(load: Callable[..., Any], cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Let a model's `from_pretrained` return a copy of the model in memory."""
    name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    if not isinstance(name, InMemoryName):
        return load(cls, *args, **kwargs)
    loaded, info = name.load(cls, kwargs)
    return (loaded, info) if kwargs.get("output_loading_info") else loaded


def read_config(
    read: Callable[..., Any], cls: Any, /, pretrained_model_name_or_path: Any, **kwargs: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let `AutoConfig` read the config from the model in memory, instead of the file.

    A config class's own `from_pretrained` reads the file: PEFT compares the vocabulary's size with the one there.
    """
    name = pretrained_model_name_or_path
    settings, unused = read(cls, name, **kwargs)
    if isinstance(name, InMemoryName) and kwargs.get("_from_auto"):
        if (found := name.config_dict()) is not None:
            return found, unused
        logger.warning("%r is the name of a model that was changed in memory, and is gone: its file is read", name)
    return settings, unused


def store_no_base(to_dict: Callable[..., Any], config: Any, /) -> Any:
    """Make PEFT store a base-model name that no tool can load."""
    name = getattr(config, "base_model_name_or_path", None)  # not every config has a base model
    return to_dict(config) | ({"base_model_name_or_path": name.unsaved()} if isinstance(name, InMemoryName) else {})


def refuse_name(init: Callable[..., Any], llm: Any, /, *args: Any, **kwargs: Any) -> None:
    """Let the constructor of vLLM's `LLM` refuse the name."""
    name = args[0] if args else kwargs.get("model")
    if isinstance(name, InMemoryName):
        raise name.refusal("vLLM", "it loads a checkpoint from the disk")
    init(llm, *args, **kwargs)


def write_as_string(yaml: Any) -> None:
    """Let YAML write the name as a string: it writes an instance of a subclass as a call of Python, or refuses it."""
    for dumper in ("Dumper", "SafeDumper", "CDumper", "CSafeDumper"):
        if hasattr(yaml, dumper):  # those in C are optional
            getattr(yaml, dumper).add_representer(InMemoryName, lambda dumper, name: dumper.represent_str(str(name)))
