"""Checks of a config's settings that transformers makes too late, or with an error that does not name config.json."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_qknorm.files.formatting import shorten

SIZES: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
LARGEST: Final = 2**31 - 1  # of a size
DEEPEST: Final = 10_000  # number of layers: a model is built layer by layer before anything else shows
ACTIVATIONS: Final = ("hidden_act", "hidden_activation", "activation_function")


def check_settings(config: Any) -> None:
    """Raise ValueError, naming config.json and the setting, for a value that no model can be built with.

    Looked at are sizes, the sliding window, and the names of architectures, activations and RoPE types.
    """
    for name in SIZES:
        value = _setting(config, name)
        most = DEEPEST if name == "num_hidden_layers" else LARGEST
        if isinstance(value, int) and not 1 <= value <= most:
            raise _impossible(config, name, value, f"a whole number from 1 to {most}")
    queries, keys = (_setting(config, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(queries, int) and isinstance(keys, int) and queries % keys:
        raise _impossible(config, "num_key_value_heads", keys, f"a divisor of num_attention_heads={queries}")
    for experts in EXPERTS:
        number, used = (_setting(config, name) for name in (experts, "num_experts_per_tok"))
        if isinstance(number, int) and isinstance(used, int) and used > number:
            raise _impossible(config, "num_experts_per_tok", used, f"at most {experts}={number}")
    window = getattr(config, "sliding_window", None)
    if window is not None and (not isinstance(window, int) or window < 1):
        raise _impossible(config, "sliding_window", window, "a whole number ≥ 1, or null")
    causal = getattr(config, "is_causal", None)
    if causal is not None and not isinstance(causal, bool):
        raise _impossible(config, "is_causal", causal, "true or false")
    dtype = getattr(config, "dtype", None)
    computed = dtype.is_floating_point if isinstance(dtype, torch.dtype) else isinstance(dtype, str | dict)
    if dtype is not None and not computed:
        raise _impossible(config, "dtype", dtype, "the name of a floating-point dtype, or null")
    text = getattr(config, "text_config", None)
    if text is not None and not isinstance(text, PretrainedConfig):
        raise _impossible(config, "text_config", text, f"nothing of that name for model_type {config.model_type!r}")
    names = getattr(config, "architectures", None)
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise _impossible(config, "architectures", names, "a list of names of classes, or null")
    for name in ACTIVATIONS:
        value = _setting(config, name)
        if isinstance(value, str) and value not in ACT2FN:
            raise _impossible(config, name, value, f"one of {', '.join(sorted(ACT2FN))}")
    kinds = ("default", *sorted(ROPE_INIT_FUNCTIONS))
    for name, rope in _ropes(config):
        value = rope.get("rope_type", "default")
        if value not in kinds:
            raise _impossible(config, f"{name}.rope_type", value, f"one of {', '.join(kinds)}")


# What transformers raises for settings that it does not look at, beside ValueError.
CAUSED: Final = (
    AttributeError, KeyError, IndexError, TypeError, OverflowError, RuntimeError, StrictDataclassError,
    ZeroDivisionError,
)  # fmt: skip


@contextmanager
def config_errors(file: str, model_type: Any, architectures: Any) -> Iterator[None]:
    """Turn the errors that a setting of config.json causes, while a config or a model is made, into ValueError."""
    try:
        yield
    except CAUSED as error:
        if isinstance(error, RuntimeError) and "negative dimension" not in str(error):
            raise  # no memory, for example
        raise ValueError(
            f"{file} can't be used, with model_type {shorten(model_type)} and architectures {shorten(architectures)}: "
            f"{describe(error)}. Restore the config.json that was saved with the weights"
        ) from error


def no_attention(model: Any, attention: str) -> ValueError:
    """The error for a model without the attention class that its config's model type has."""
    config = model.config
    return ValueError(
        f"{config_file(config)}: {type(model).__name__} has no {attention} to patch. Either model_type "
        f"{config.model_type!r} does not fit architectures {shorten(config.architectures)}, or no layer has attention"
    )


def describe(error: Exception) -> str:
    """An error of transformers in one line: the first, or of its validators the last, which names the cause."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1 if isinstance(error, StrictDataclassError) else 0]
    return f"{type(error).__name__}: {line.strip()[:400]}"


def config_file(config: Any) -> str:
    """Where a config was read from, for error messages."""
    name = getattr(config, "_name_or_path", None)
    return str(Path(name) / "config.json") if name else "config.json"


def _setting(config: Any, name: str) -> Any:
    """A setting under the name that most families use. Gemma 4's own attributes raise where layers differ."""
    return vars(config).get(config.attribute_map.get(name, name))


def _ropes(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The settings of RoPE by name: one mapping, or one for each kind of layers."""
    name, found = "rope_parameters", _setting(config, "rope_parameters")
    if isinstance(found, dict):
        kinds = {f"{name}.{kind}": value for kind, value in found.items() if isinstance(value, dict)}
        yield from (kinds or {name: found}).items()


def _impossible(config: Any, name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{config_file(config)}: {name} is {shorten(value)}, expected {expected}")
