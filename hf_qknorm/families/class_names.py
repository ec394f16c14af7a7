"""Names of patched models' classes and model types, and the Auto classes that load them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import transformers
from transformers.models.auto import modeling_auto

PREFIX: Final = "QKNorm"  # of the classes of patched models
TYPE_PREFIX: Final = "qknorm_"  # of their model types

# For each Auto class, transformers' own table from a model type to the names of its classes. AutoModelForDecision is
# left out: its models wrap a model of a family, which is patched as a tower.
AUTO_CLASSES: Final[dict[str, dict[str, Any]]] = {
    name: auto._model_mapping._model_mapping
    for name, auto in vars(modeling_auto).items()
    if name.startswith("Auto") and hasattr(auto, "_model_mapping") and hasattr(transformers, name)
    if name != "AutoModelForDecision"
}

# Parts of composite models that AutoModelForCausalLM makes from the config of the whole alone. Patched, each is loaded
# by its own config.
PARTS: Final = {
    "emu3_text_model": "emu3",
    "mllama_text_model": "mllama",
    "musicgen_decoder": "musicgen",
    "musicgen_melody_decoder": "musicgen_melody",
}

# Types that transformers, PEFT or TRL compare a model's type with, and not only look up in a table.
COMPARED: Final = ("falcon_h1", "hyperclovax", "nemotron_h", "whisper")


def made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """`functools.cache` for a function that makes classes: threads that call it together get the same class."""
    made: dict[tuple[Any, ...], Any] = {}

    @wraps(make)
    def of(*arguments: Any) -> Any:
        return made.get(arguments) or made.setdefault(arguments, make(*arguments))

    return of


def classes_of(model_type: str) -> dict[str, tuple[str, ...]]:
    """Map each Auto class that loads a model type to the names of its classes, nearly always one."""
    found = {auto: names[model_type] for auto, names in AUTO_CLASSES.items() if model_type in names}
    if model_type in PARTS:
        found["AutoModelForCausalLM"] = AUTO_CLASSES["AutoModelForCausalLM"][PARTS[model_type]]
    return {auto: (names,) if isinstance(names, str) else names for auto, names in found.items()}


def types_of(architecture: str) -> set[str]:
    """Return the model types that an Auto class loads as the class `architecture`; empty if no Auto class has it."""
    found = {
        model_type
        for table in AUTO_CLASSES.values()
        for model_type, names in table.items()
        if architecture == names or (isinstance(names, tuple) and architecture in names)
    }
    return found | {part for part, whole in PARTS.items() if whole in found}
