"""PEFT on patched models: which modules an adapter trains beside its own weights, and default targets.

Patch (and calibrate) first, then wrap: the norms see the projections' output, adapters included.

    qk.patch_model(model, "qk_norm")
    config = peft.LoraConfig(modules_to_save=qk.peft_modules_to_save(model))
    model = peft.get_peft_model(model, config)
"""

from __future__ import annotations

from peft.utils import constants
from torch import nn

from hf_qknorm.families import known_families
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.model.norms import HeadNorm


def peft_modules_to_save(model: nn.Module) -> list[str]:
    """The names of the norms that have gains, for `modules_to_save` of a PEFT config: trained and saved whole.

    Empty for a scheme without gains. Raises ValueError for a model that is not patched.
    """
    layers = patched_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} is not patched: call patch_model(model, scheme) first")
    trained = {
        f"{path}.{name}": name
        for path, layer in layers.items()
        for name, norm in head_norms(layer).items()
        if any(True for _ in norm.parameters())
    }
    names = sorted(set(trained.values()))
    taken = [path for path, module in model.named_modules() if not isinstance(module, HeadNorm)]
    if any(path.endswith(name) for path in taken for name in names):  # as peft matches them: others would be meant too
        return list(trained)
    return names


def register() -> None:
    """Give every derived model type the targets that peft knows for its base, in each of peft's tables."""
    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_"):
            table.update({f"{TYPE_PREFIX}{known}": table[known] for known in known_families() if known in table})
