"""PEFT with patched models: default targets, the packages that it imports from, and gains in adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from hf_qknorm.families import known_families
from hf_qknorm.families.class_names import TYPE_PREFIX

GAINS: Final = tuple(f".{norm}_norm.{kind}" for norm in "qkv" for kind in ("weight", "bias"))
PREFIX: Final = "base_model.model."  # of the names in an adapter


def add_targets(constants: Any) -> None:
    """Give every derived model type the default targets of its base."""
    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_"):
            table.update({f"{TYPE_PREFIX}{known}": table[known] for known in known_families() if known in table})


def allow_package(allowed: Callable[[], list[str]]) -> list[str]:
    """Let PEFT load an adapter whose config names a derived class: it imports from the packages of a list alone."""
    return [*allowed(), "hf_qknorm"]


def keep_gains(
    load: Callable[..., Any], /, model: Any, peft_model_state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Let PEFT refuse gains that it would leave out, for lack of a norm in the model.

    Raises ValueError before anything is loaded.
    """
    gains = [name for name in peft_model_state_dict if name.endswith(GAINS)]
    modules = {path for path, _ in model.named_modules()} if gains else set()
    for name in gains:
        path = name.rpartition(".")[0].removeprefix(PREFIX)
        if not {path, PREFIX + path} & modules:
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            raise ValueError(
                f"the adapter holds {name}, the gain of a norm that this {type(base).__name__} does not have: it "
                "was trained on a patched model. Load it onto that model: from the folder where the patched model "
                "was saved, or patched with the same scheme"
            )
    return load(model, peft_model_state_dict, *args, **kwargs)
