"""PEFT on patched models: the norms that an adapter trains, and PEFT's classes. PEFT itself is not imported here."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from hf_qknorm.model.attention import head_norms, norm_copies, patched_layers, require_patched
from hf_qknorm.model.norms import HeadNorm


def peft_modules_to_save(model: nn.Module) -> list[str]:
    """Return the names of the norms, for `modules_to_save` of a PEFT config.

    PEFT then trains their gains, and saves them and their knees with the adapter. The list is empty for a scheme
    without norms. Patch (and calibrate) the model before PEFT wraps it: the norms see the projections' output with the
    adapters' part.

    Raises ValueError for a model that is not patched.

    >>> _ = qk.patch_model(model, scheme="qk_norm")
    >>> qk.peft_modules_to_save(model)
    ['k_norm', 'q_norm']
    >>> from peft import LoraConfig, get_peft_model
    >>> model = get_peft_model(model, LoraConfig(modules_to_save=qk.peft_modules_to_save(model)))
    """
    trained = {f"{path}.{name}": name for path, layer in require_patched(model).items() for name in head_norms(layer)}
    names = sorted(set(trained.values()))
    others = [path for path, module in model.named_modules() if not isinstance(module, HeadNorm)]
    if any(path.endswith(name) for path in others for name in names):  # PEFT matches by suffix
        return list(trained)
    return names


def check_held(model: nn.Module) -> None:
    """Raise ValueError for a norm that no adapter of the model holds: their files would lack its knee and gains."""
    adapted = unwrap_peft(model) is not model or any(map(is_adapter_layer, model.modules()))
    for path, layer in patched_layers(model).items() if adapted else ():
        for name, copies in norm_copies(layer).items():
            if len(copies) == 1:
                raise ValueError(
                    f"{path}.{name} is in no adapter, whose file would lack its new knee and gains: set these before "
                    "adapters are added or after they are merged, or add them with "
                    "modules_to_save=peft_modules_to_save(model)"
                )


def unwrap_peft(model: nn.Module) -> Any:
    """Return the transformers model in PEFT's wrapper, or `model` itself."""
    return model.get_base_model() if isinstance(model, _loaded("peft", "PeftModel")) else model


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether `module` is a layer that PEFT put around one of the model's own."""
    return isinstance(module, _loaded("peft.tuners.tuners_utils", "BaseTunerLayer"))


def _loaded(module: str, name: str) -> Any:
    """Return a class for `isinstance`: the empty tuple where its module is not loaded, so that no instance exists."""
    return getattr(sys.modules.get(module), name, ())
