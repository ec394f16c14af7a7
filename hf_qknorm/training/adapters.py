"""PEFT on patched models: the modules that an adapter trains in full, and default target modules.

Patch (and calibrate) first, then wrap: the norms get the projections' output, adapters included.
"""

from __future__ import annotations

from peft.utils import constants
from torch import nn

from hf_qknorm.families import known_families
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.model.attention import head_norms
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.stats.observers import require_patched


def peft_modules_to_save(model: nn.Module) -> list[str]:
    """The names of the norms with gains, for `modules_to_save` of a PEFT config: PEFT trains and saves these in full.

        >>> qk.peft_modules_to_save(qk.patch_model(model, "qk_norm"))
        ['k_norm', 'q_norm']

    Empty for a scheme without gains. Raises ValueError for a model that is not patched.
    """
    trained = {
        f"{path}.{name}": name
        for path, layer in require_patched(model).items()
        for name, norm in head_norms(layer).items()
        if any(True for _ in norm.parameters())
    }
    names = sorted(set(trained.values()))
    taken = [path for path, module in model.named_modules() if not isinstance(module, HeadNorm)]
    if any(
        path.endswith(name) for path in taken for name in names
    ):  # PEFT matches by ending, and would match these too
        return list(trained)
    return names


def register() -> None:
    """Add every derived model type to PEFT's tables, with the targets of its base type."""
    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_"):
            table.update({f"{TYPE_PREFIX}{known}": table[known] for known in known_families() if known in table})
