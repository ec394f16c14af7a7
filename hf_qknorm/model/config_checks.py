"""Checks of a config's settings that transformers does not make, and its own errors with the name of config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from hf_qknorm.files.formatting import shorten

SHARE: Final = "a number from 0 to 1: the share of a head's columns that is rotated"

# Settings that may be absent or null: the test of any other value, and the values that pass it.
OPTIONAL: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "sliding_window": (lambda window: isinstance(window, int) and window >= 1, "a whole number ≥ 1, or null"),
    "is_causal": (lambda causal: isinstance(causal, bool), "true or false"),
    "dtype": (
        lambda dtype: dtype.is_floating_point if isinstance(dtype, torch.dtype) else isinstance(dtype, str | dict),
        "the name of a floating-point dtype, or null",
    ),
    "text_config": (lambda part: isinstance(part, PretrainedConfig), "no such setting for this model type"),
    "architectures": (
        lambda names: isinstance(names, list) and all(isinstance(name, str) for name in names),
        "a list of names of classes, or null",
    ),
}


def check_settings(config: Any) -> None:
    """Raise ValueError, naming config.json and the setting, for a value that transformers takes and computes wrongly.

    Others it refuses itself when it builds the config or the model (`config_errors`).
    """
    for name, value, is_valid, expected in _checks(config):
        if not is_valid:
            raise ValueError(f"{config_file(config)}: {name} is {shorten(value)}, expected {expected}")


def _checks(config: Any) -> Iterator[tuple[str, Any, bool, str]]:
    """Yield name and value of each setting, whether it is possible, and the values that are."""
    queries, keys = (_setting(config, name) for name in ("num_attention_heads", "num_key_value_heads"))
    divides = not (isinstance(queries, int) and isinstance(keys, int)) or queries % keys == 0
    yield "num_key_value_heads", keys, divides, f"a divisor of num_attention_heads={queries}"
    for name, (test, expected) in OPTIONAL.items():
        value = getattr(config, name, None)
        absent = value is None or (name == "sliding_window" and value == 0 and not _may_slide(config))
        yield name, value, absent or test(value), expected
    shares = {f"{name}.partial_rotary_factor": rope.get("partial_rotary_factor") for name, rope in _ropes(config)}
    shares |= {name: _setting(config, name) for name in ("partial_rotary_factor", "rotary_pct")}
    for name, value in shares.items():
        yield name, value, value is None or (isinstance(value, int | float) and 0 <= value <= 1), SHARE


# The errors beside ValueError that transformers raises for settings that it does not check.
CAUSED: Final = (
    AttributeError, KeyError, IndexError, TypeError, OverflowError, RuntimeError, StrictDataclassError,
    ZeroDivisionError,
)  # fmt: skip


@contextmanager
def config_errors(file: str, model_type: Any, architectures: Any) -> Iterator[None]:
    """Convert errors that a setting of config.json causes while a config or a model is built into ValueError."""
    try:
        yield
    except CAUSED as error:
        if isinstance(error, RuntimeError) and "negative dimension" not in str(error):
            raise  # out of memory, for example
        raise ValueError(
            f"{file} can't be used, with model_type {shorten(model_type)} and architectures {shorten(architectures)}: "
            f"{describe_error(error)}. Restore the config.json that was saved with the weights"
        ) from error


def no_attention_error(model: Any, attention: str) -> ValueError:
    """Return the error for a model without the attention class of its model type."""
    config = model.config
    return ValueError(
        f"{config_file(config)}: {type(model).__name__} has no {attention} to patch. Either model_type "
        f"{config.model_type!r} does not fit architectures {shorten(config.architectures)}, or no layer has attention"
    )


def describe_error(error: Exception) -> str:
    """Return an error in one line: the first of its message, or a validator's last, which names the cause."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1 if isinstance(error, StrictDataclassError) else 0]
    return f"{type(error).__name__}: {line.strip()[:400]}"


def config_file(config: Any) -> str:
    """Return the path that a config was read from, for error messages.

    transformers stores the name "None" for `from_pretrained(None)`.
    """
    name = getattr(config, "_name_or_path", None)
    return str(Path(name) / "config.json") if name not in (None, "", "None") else "config.json"


def _setting(config: Any, name: str) -> Any:
    """Return the setting that most families call `name`. Gemma 4's attributes raise if layers differ."""
    return vars(config).get(config.attribute_map.get(name, name))


def _may_slide(config: Any) -> bool:
    """Whether a layer may attend through `sliding_window`, which the config of Qwen2-MoE sets to 0 where none does."""
    switched_off = hasattr(type(config), "use_sliding_window") and not config.use_sliding_window
    return not switched_off or any("sliding" in str(kind) for kind in getattr(config, "layer_types", None) or ())


def _ropes(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield RoPE settings by name: one mapping, or one for each kind of layer."""
    name, found = "rope_parameters", _setting(config, "rope_parameters")
    if isinstance(found, dict):
        kinds = {f"{name}.{kind}": value for kind, value in found.items() if isinstance(value, dict)}
        yield from (kinds or {name: found}).items()
