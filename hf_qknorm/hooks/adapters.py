"""PEFT with patched models: default targets, the packages that it imports from, and gains in adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from hf_qknorm.hooks.auto_classes import add_derived

GAIN: Final = re.compile(r"(.+\.[qkv]_norm)\.(?:.+\.)?(weight|bias)")  # in a model, and in files of all methods of PEFT
MODEL_PREFIX: Final = "base_model.model."  # of the names in an adapter


def add_targets(constants: Any) -> None:
    """Give every derived model type the default targets of its base."""
    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_"):
            add_derived(table)


def allow_package(allowed: Callable[[], list[str]]) -> list[str]:
    """Let PEFT load an adapter whose config names a derived class: it imports from the packages of a list alone."""
    return [*allowed(), "hf_qknorm"]


def keep_gains(
    load: Callable[..., Any], /, model: Any, peft_model_state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Let PEFT refuse gains and biases that it would leave out, for lack of them in the model.

    Raises ValueError before anything is loaded.
    """
    stored = {name: found for name in peft_model_state_dict if (found := GAIN.fullmatch(name))}
    parameters = model.named_parameters(remove_duplicate=False) if stored else ()
    names = (name.replace(".original_module", "") for name, _ in parameters)  # of any module around a norm
    held = {found.groups() for name in names if (found := GAIN.fullmatch(name))}
    for name, found in stored.items():
        path, kind = found[1].removeprefix(MODEL_PREFIX), found[2]
        if not {(path, kind), (MODEL_PREFIX + path, kind)} & held:
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            raise ValueError(
                f"the adapter holds {name}, of a norm that this {type(base).__name__} does not have: it was trained on "
                "a patched model. Load it onto that model: from the folder where the patched model was saved, or "
                "patched with the same scheme"
            )
    return load(model, peft_model_state_dict, *args, **kwargs)
