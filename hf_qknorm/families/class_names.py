"""The names of patched models' classes and types, and the Auto classes that load them."""

from __future__ import annotations

from typing import Any, Final

import transformers
from transformers.models.auto import modeling_auto

PREFIX: Final = "QKNorm"  # of the classes of patched models
TYPE_PREFIX: Final = "qknorm_"  # of their model types

# They load models of a type of their own, around one of the family's: a tower of these is patched.
COMPOSITE: Final = ("AutoModelForDecision",)

# For each Auto class, transformers' own table from a model type to the names of its classes.
AUTO_CLASSES: Final[dict[str, dict[str, Any]]] = {
    name: auto._model_mapping._model_mapping
    for name, auto in vars(modeling_auto).items()
    if name.startswith("Auto") and hasattr(auto, "_model_mapping") and hasattr(transformers, name)
    if name not in COMPOSITE
}


def types_of(architecture: str) -> set[str]:
    """The model types that an Auto class loads as the class of this name; none for a class that no Auto class has."""
    tables = (names.items() for names in AUTO_CLASSES.values())
    return {model_type for items in tables for model_type, name in items if architecture in _as_tuple(name)}


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
