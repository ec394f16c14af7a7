"""Multimodal models: the tower that is patched, and the check that a checkpoint restores it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hf_qknorm.families import FAMILIES, Family
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.families.refused import REFUSED
from hf_qknorm.files.formatting import shorten
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.install import own_layers
from hf_qknorm.model.load_checks import UnpatchedClassError


def towers_of(model: PreTrainedModel) -> dict[str, str]:
    """Map the path of each model inside a multimodal `model` to its key in the config."""
    if model.config.model_type.removeprefix(TYPE_PREFIX) in FAMILIES:
        return {}
    keys = {id(getattr(model.config, key, None)): key for key in model.config.sub_configs}
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        inner = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, PreTrainedModel) and id(module.config) in keys and not inner:
            found[path] = keys[id(module.config)]
    return found


def pick_tower(model: PreTrainedModel, name: str | None) -> tuple[str, str] | None:
    """Return path and config key of a tower, by default the text tower; None for a model without towers.

    Raises ValueError for an unknown name, and without a name unless there is exactly one text tower.
    """
    towers = towers_of(model)
    if name is None:
        text = id(model.config.get_text_config(decoder=True))
        picked = [path for path, key in towers.items() if id(getattr(model.config, key)) == text]
    else:
        picked = [path for path in towers if path == name or path.rpartition(".")[2] == name]
    if len(picked) == 1:
        return picked[0], towers[picked[0]]
    if name is None and not towers:
        return None
    if name is None:
        reason = REFUSED.get(model.config.model_type, "it does not have exactly one text tower")
        raise ValueError(f"{type(model).__name__}: {reason}. Name a tower, tower=...: {', '.join(towers)}")
    has = f"its towers are {', '.join(towers)}" if towers else "it has no towers"
    raise ValueError(f"tower={shorten(name)} is not possible for {type(model).__name__}: {has}")


def check_saved_tower(model: PreTrainedModel, path: str, key: str, config: PretrainedConfig, family: Family) -> None:
    """Raise ValueError unless a checkpoint of `model`, with the patched `config` under `key`, restores the tower.

    The model is built on the meta device from the config that would be saved.
    """
    saved = with_config(model.config, key, config)
    expected = {f"{path}.{name}" for name in own_layers(model.get_submodule(path), family)}
    restored: set[str] = set()
    try:
        rebuilt = type(saved).from_dict(copy.deepcopy(saved.to_dict()))
    except UnpatchedClassError:
        rebuilt = None
    if rebuilt is not None and type(getattr(rebuilt, key)) is type(config):
        with torch.device("meta"):
            restored = {name for name in patched_layers(type(model)(rebuilt)) if name.startswith(f"{path}.")}
    if restored != expected:
        raise ValueError(
            f"{type(model).__name__} builds its {path}, or the config of it, from a fixed class instead of {key}'s "
            "model_type: a checkpoint of the whole model would lose the scheme. Patch and save that tower by itself: "
            f"patch_model(model.{path}, ...).save_pretrained(...)"
        )


def with_config(config: PretrainedConfig, key: str, part: Any) -> PretrainedConfig:
    """Return a shallow copy of a multimodal config with `part` under `key`."""
    changed = copy.copy(config)
    setattr(changed, key, part)
    return changed
