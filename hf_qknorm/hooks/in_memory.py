"""What other libraries do with the name of a model that was changed in memory, instead of loading the model before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_qknorm.model.in_memory import InMemoryName


def refuse_name(load: Callable[..., Any], owner: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Let a model's `from_pretrained`, or the constructor of vLLM's `LLM`, refuse the name."""
    name = args[0] if args else kwargs.get("pretrained_model_name_or_path", kwargs.get("model"))
    if isinstance(name, InMemoryName):
        raise name.refusal(f"{owner.__name__}.from_pretrained" if isinstance(owner, type) else "vLLM")
    return load(owner, *args, **kwargs)


def store_no_base(to_dict: Callable[..., Any], config: Any, /) -> Any:
    """Make PEFT store a base-model name that no tool can load."""
    name = getattr(config, "base_model_name_or_path", None)  # not every config has a base model
    return to_dict(config) | ({"base_model_name_or_path": name.unsaved()} if isinstance(name, InMemoryName) else {})


def write_as_string(yaml: Any) -> None:
    """Let YAML write the name as a string: it writes an instance of a subclass as a call of Python, or refuses it."""
    for dumper in ("Dumper", "SafeDumper", "CDumper", "CSafeDumper"):
        if hasattr(yaml, dumper):  # those in C are optional
            getattr(yaml, dumper).add_representer(InMemoryName, lambda dumper, name: dumper.represent_str(str(name)))
