"""Names of patched models' classes and model types, and the Auto classes that load them."""

from __future__ import annotations

from typing import Any, Final

import transformers
from transformers.models.auto import modeling_auto

PREFIX: Final = "QKNorm"  # of the classes of patched models
TYPE_PREFIX: Final = "qknorm_"  # of their model types

# For each Auto class, transformers' own table from a model type to the names of its classes. AutoModelForDecision is
# left out: its models wrap a model of a family, and a tower of theirs is patched.
AUTO_CLASSES: Final[dict[str, dict[str, Any]]] = {
    name: auto._model_mapping._model_mapping
    for name, auto in vars(modeling_auto).items()
    if name.startswith("Auto") and hasattr(auto, "_model_mapping") and hasattr(transformers, name)
    if name != "AutoModelForDecision"
}


def types_of(architecture: str) -> set[str]:
    """Return the model types that an Auto class loads as the class `architecture`; empty if no Auto class has it."""
    return {
        model_type
        for table in AUTO_CLASSES.values()
        for model_type, names in table.items()
        if architecture == names or (isinstance(names, tuple) and architecture in names)
    }
