"""Checks by which transformers' own classes refuse a patched checkpoint, which they would load without its scheme."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeGuard

from transformers import PretrainedConfig, PreTrainedModel

from hf_qknorm.families.class_names import PREFIX, TYPE_PREFIX
from hf_qknorm.files.untrusted import read_json
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.model.derived import QKNormModel
from hf_qknorm.model.knee_state_dict import loading
from hf_qknorm.model.load_checks import check_loaded, check_shapes, check_stored


class UnpatchedClassError(ValueError):
    """Raised when a class of transformers gets a patched checkpoint or its config."""


def register() -> None:
    """Add the checks to the two methods that every config and every model's weights pass through."""
    config: Any = PretrainedConfig
    config.__post_init__ = _refusing_settings(config.__post_init__)
    model: Any = PreTrainedModel
    model._load_pretrained_model = staticmethod(_refusing_weights(model._load_pretrained_model))


def _refusing_settings(post_init: Callable[..., None]) -> Callable[..., None]:
    @wraps(post_init)
    def checked(self: Any, **kwargs: Any) -> None:
        stored = kwargs.get("model_type")
        # a bare PretrainedConfig has no model type: no model is built from it
        if _is_patched(stored) and type(self).model_type and not isinstance(self, QKNormConfig):
            raise _refusal(str(kwargs.get("name_or_path") or "config.json"), stored, type(self).__name__)
        post_init(self, **kwargs)

    return checked


def _refusing_weights(load: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(load)
    @loading()
    def checked(model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, QKNormModel):
            return load(model, state_dict, checkpoint_files, *args, **kwargs)
        for file in (checkpoint_files or [])[:1]:
            stored = _stored_type(Path(file).with_name("config.json"))
            if _is_patched(stored):
                raise _refusal(str(Path(file).parent), stored, type(model).__name__)
        check_stored(model, state_dict, checkpoint_files)  # this check and the two below are for patched towers
        info, offloaded = load(model, state_dict, checkpoint_files, *args, **kwargs)
        check_shapes(model, info.mismatched_keys)
        check_loaded(model, info.missing_keys, info.unexpected_keys)
        return info, offloaded

    return checked


def _is_patched(model_type: Any) -> TypeGuard[str]:
    return isinstance(model_type, str) and model_type.startswith(TYPE_PREFIX)


def _stored_type(path: Path) -> Any:
    """Return the model type of a config.json; None if it can't be read, since the config came from elsewhere then."""
    try:
        config = read_json(path)
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def _refusal(where: str, stored: str, cls: str) -> UnpatchedClassError:
    return UnpatchedClassError(
        f"{where} is a patched checkpoint of model_type {stored!r}, and {cls} would load it without its scheme. Load "
        f"it with an Auto class such as AutoModelForCausalLM or AutoConfig, or with a class of hf_qknorm.model.derived "
        f"({PREFIX}...); unpatch_model then gives the unpatched model"
    )
