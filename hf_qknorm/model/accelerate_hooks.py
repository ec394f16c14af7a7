"""accelerate's hooks, which run a model on several devices or with offloaded weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import align_module_device
from torch import nn


def set_module_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Set the module's class. Its hook is removed meanwhile, since it shadows `forward` on the instance."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        remove_hook_from_module(module)
        vars(module).pop("forward", None)  # the hook leaves the old class's on the instance
    module.__class__ = cls
    if hook is not None:
        add_hook_to_module(module, hook)


def execution_device(*modules: nn.Module) -> torch.device | None:
    """Return the device of the first module whose hook names one, or None."""
    devices = (getattr(hook, "execution_device", None) for module in modules for hook in _hooks(module))
    return next((torch.device(device) for device in devices if device is not None), None)


def input_device(model: Any) -> torch.device:
    """Return the device for a model's inputs: if its first weights are offloaded, where its hook computes."""
    device: torch.device = model.device
    return device if device.type != "meta" else execution_device(model) or torch.device("cpu")


@contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """A context in which offloaded weights of the module are in memory."""
    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(align_module_device(part))
        yield


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook runs the module or a part of it."""
    return any(_hooks(part) for part in module.modules())


def check_offload(model: nn.Module, layers: Iterable[str]) -> None:
    """Raise ValueError for a layer whose weights one hook loads together, since it would not load new weights."""
    for name in layers:
        path = name.split(".")
        for above in (".".join(path[:depth]) for depth in range(len(path) + 1)):
            for hook in _hooks(model.get_submodule(above)):
                if isinstance(hook, AlignDevicesHook) and hook.offload and hook.place_submodules:
                    raise ValueError(
                        f"{name}: accelerate loads all weights of {above or 'the model'} together "
                        "(preload_module_classes), and would miss a new norm's. Patch the model first and offload it "
                        "after, or offload it without preload_module_classes"
                    )


def _hooks(module: nn.Module) -> list[Any]:
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))
