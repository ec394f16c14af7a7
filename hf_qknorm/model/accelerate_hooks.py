"""accelerate's hooks, by which a model runs on several devices or with weights that are brought in for each call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import nn


def set_module_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Swap the module's class. Its hook shadows `forward` on the instance: it comes off meanwhile."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        remove_hook_from_module(module)
        vars(module).pop("forward", None)  # left behind: the old class's, on the instance
    module.__class__ = cls
    if hook is not None:
        add_hook_to_module(module, hook)


def execution_device(*modules: nn.Module) -> torch.device | None:
    """Where the first of the modules whose hooks name a device runs; None where none does."""
    devices = (getattr(hook, "execution_device", None) for module in modules for hook in _hooks(module))
    return next((torch.device(device) for device in devices if device is not None), None)


def input_device(model: Any) -> torch.device:
    """Where a transformers model takes its inputs: where its hook computes, if its first weights are offloaded."""
    device: torch.device = model.device
    return device if device.type != "meta" else execution_device(model) or torch.device("cpu")


def check_room(model: nn.Module, layers: Iterable[str]) -> None:
    """Raise ValueError for a layer whose weights a hook brings in all together, which knows no new ones."""
    for name in layers:
        path = name.split(".")
        for above in (".".join(path[:depth]) for depth in range(len(path) + 1)):
            for hook in _hooks(model.get_submodule(above)):
                if isinstance(hook, AlignDevicesHook) and hook.offload and hook.place_submodules:
                    raise ValueError(
                        f"{name}: accelerate brings in all weights of {above or 'the model'} together "
                        "(preload_module_classes), and would not find those of a new norm. Patch the model first and "
                        "offload it then, or offload it without preload_module_classes"
                    )


def _hooks(module: nn.Module) -> list[Any]:
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))
