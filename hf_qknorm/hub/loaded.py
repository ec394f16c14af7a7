"""Whether the weights that were loaded fit the scheme that a config tells of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import PreTrainedModel

from hf_qknorm.attention import NORM_NAMES, patched_layers

_AFTERWARDS = ContextVar("the model that is being loaded is checked afterwards", default=False)


@contextmanager
def checked_afterwards() -> Iterator[None]:
    """Leave it to `check_loaded`, which can tell more of what is wrong."""
    token = _AFTERWARDS.set(True)
    try:
        yield
    finally:
        _AFTERWARDS.reset(token)


def check_loaded(model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise ValueError for norms that `from_pretrained` found missing, of another shape, or without a scheme."""
    layers = patched_layers(model)
    own = {
        f"{name}.{norm}.{parameter}"
        for name in layers
        for norm in NORM_NAMES.values()
        for parameter in ("weight", "bias", "blend")
    }
    prefix = f"{model.base_model_prefix}."

    def ours(keys: Any) -> list[str]:
        return sorted(key for key in keys if key in own or f"{prefix}{key}" in own or key.removeprefix(prefix) in own)

    mismatched = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    problems = {
        "missing from the weights": ours(info["missing_keys"]),
        "of another shape in the weights": ours(mismatched),
        "in the weights but not in the scheme": ours(info["unexpected_keys"]),
    }
    for what, keys in problems.items():
        if keys:
            raise _disagreement(model, what, keys)


def check_none_missing(model: PreTrainedModel) -> None:
    """Raise ValueError if the layers' weights were loaded and a norm's were not.

    For towers of multimodal models, whose checkpoints transformers' own class loads: it would make up what is missing.
    """
    if _AFTERWARDS.get():
        return
    parameters = {
        f"{layer}.{name}": parameter
        for layer, module in patched_layers(model).items()
        for name, parameter in module.named_parameters()
    }
    loaded = {name for name, parameter in parameters.items() if getattr(parameter, "_is_hf_initialized", False)}
    missing = [name for name in parameters if name.split(".")[-2] in NORM_NAMES.values() and name not in loaded]
    if loaded and missing:
        raise _disagreement(model, "missing from the weights, or of another shape there", missing)


def _disagreement(model: PreTrainedModel, what: str, keys: list[str]) -> ValueError:
    return ValueError(
        f"{model.config._name_or_path or 'the checkpoint'}: {len(keys)} norm parameters are {what}, first "
        f"{keys[0]!r}. config.json says qk_norm = {model.config.scheme}; loading would silently change the "
        "model. Restore the matching config.json or weights"
    )
