"""The modules that hold a model's config, or a copy of it."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


def config_owners(model: PreTrainedModel) -> list[Any]:
    """The model, and each model inside it that holds a copy of its config, as T5's encoder and decoder do."""
    owners = {id(model.config): model}
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and type(module.config) is type(model.config):
            owners.setdefault(id(module.config), module)
    return list(owners.values())


def check_one_config(model: PreTrainedModel, layers: dict[str, nn.Module]) -> None:
    """Raise ValueError for a layer with a config of another type than the model's: a checkpoint has one scheme."""
    for name, layer in layers.items():
        config: Any = getattr(layer, "config", model.config)
        if type(config) is not type(model.config):
            raise ValueError(
                f"{name} of {type(model).__name__} has a {type(config).__name__}, and other layers have a "
                f"{type(model.config).__name__}: a checkpoint of the whole model would keep the scheme of one of them. "
                "Patch and save the model inside it whose layers have one config: patch_model(model.decoder, ...)"
            )


def share_config(model: PreTrainedModel) -> None:
    """Give layers with a copy of the model's config the config itself: they read their backend from it.

    A VisionEncoderDecoderModel that is made of two models copies their configs, and leaves the layers theirs.
    """
    owned = {id(module.config) for module in model.modules() if isinstance(module, PreTrainedModel)}
    for module in model.modules():
        config = getattr(module, "config", None)
        if type(config) is type(model.config) and id(config) not in owned:
            module.config = model.config


def share_backend(model: PreTrainedModel) -> None:
    """Give the models inside a model its backend: older transformers passes over copies of the config."""
    for owner in config_owners(model):
        owner.config._attn_implementation_internal = model.config._attn_implementation


def set_config(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Replace the model's config in each module that holds it, in place."""
    old = model.config
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config
